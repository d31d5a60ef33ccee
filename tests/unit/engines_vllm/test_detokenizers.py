"""Text of the same tokens by vLLM and by embedded workers: where it differs, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.models import DEMO_MODEL_PATH
from baton.tokenizer.tokenizer import load_tokenizer
from baton.worker.output_processor import REPLACEMENT, IncrementalDetokenizer
from tests.lazy_modules import LazyModule, skip_without_vllm

skip_without_vllm()

if TYPE_CHECKING:
    from typing import Any

detokenizer = LazyModule("vllm.v1.engine.detokenizer")
sampling_params = LazyModule("vllm.sampling_params")
transformers = LazyModule("transformers")

PROMPT = [300, 4000, 1234]


@dataclass
class Request:
    """What vLLM's detokenizer reads of a request."""

    sampling_params: Any
    request_id: str = "r"
    prompt_token_ids: list[int] = field(default_factory=lambda: list(PROMPT))


def test_an_answer_that_ends_within_a_character_has_another_text() -> None:
    """vLLM leaves the unfinished character out; embedded workers send U+FFFD for it.

    So answers of the two engines are compared by tokens, not by text.
    """
    fast = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    own = load_tokenizer(DEMO_MODEL_PATH)
    request = Request(sampling_params.SamplingParams(max_tokens=1))
    num_unfinished = 0
    for token in range(len(fast)):
        theirs = detokenizer.FastIncrementalDetokenizer(fast, request)
        theirs.update([token], stop_terminated=False)
        text = theirs.get_next_output_text(finished=True, delta=False)
        ours = IncrementalDetokenizer(own, PROMPT, skip_special_tokens=True)
        pieces = ours.push(token) + ours.finish()
        if pieces.endswith(REPLACEMENT):
            num_unfinished += 1
            assert text == ""
            assert pieces.strip(REPLACEMENT) == ""
        else:
            assert pieces == text
    assert num_unfinished >= 128, "each byte of 128 and more is a token"
