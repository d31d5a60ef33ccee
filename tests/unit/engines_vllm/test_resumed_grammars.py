"""A grammar that goes on behind given tokens allows what it would have allowed behind its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import baton.models
from baton.engines.vllm import resumed_grammars
from baton.engines.vllm.resumed_grammars import NUM_GIVEN_FIELD
from tests.lazy_modules import LazyModule, skip_without_vllm

skip_without_vllm()
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

guidance = LazyModule("vllm.v1.structured_output.backend_guidance")
reasoning = LazyModule("vllm.reasoning")
requests = LazyModule("vllm.v1.request")
sampling_params = LazyModule("vllm.sampling_params")
structured_output = LazyModule("vllm.v1.structured_output")
transformers = LazyModule("transformers")
xgrammar = LazyModule("vllm.v1.structured_output.backend_xgrammar")

DEMO = Path(baton.models.__file__).parent / "demo"
BACKENDS = {
    "guidance": lambda: guidance.GuidanceBackend,
    "xgrammar": lambda: xgrammar.XgrammarBackend,
}
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
ANSWER = '{"n": 1234567}'
PROMPT = "What are you?"
THOUGHT = "<think>No {brace} is meant.</think>"


def make_manager(backend: str, *, thinks: bool = False) -> Any:
    """vLLM's manager of an engine without threads; `thinks`: with a parser of reasoning."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(["<think>", "</think>"])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        model_config=SimpleNamespace(
            skip_tokenizer_init=True, is_diffusion=False, hf_config=SimpleNamespace(model_type="")
        ),
        structured_outputs_config=SimpleNamespace(
            enable_in_reasoning=False,
            disable_any_whitespace=False,
            disable_additional_properties=False,
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    manager = structured_output.StructuredOutputManager(config)
    manager.tokenizer = tokenizer
    manager.backend = BACKENDS[backend]()(config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    if thinks:
        manager.reasoner_cls = reasoning.ReasoningParserManager.get_reasoning_parser("deepseek_r1")
    return manager


def begin(manager: Any, token_ids: list[int], num_given: int = 0) -> Any:
    """A request of vLLM's, of which `token_ids` are the prompt, with its grammar."""
    params = sampling_params.SamplingParams(
        max_tokens=50,
        structured_outputs=sampling_params.StructuredOutputsParams(json=SCHEMA),
        extra_args={"kv_transfer_params": {NUM_GIVEN_FIELD: num_given} if num_given else {}},
    )
    request = requests.Request("r", list(token_ids), params, None)
    request.structured_output_request.grammar = manager._create_grammar(request)
    return request


def find_allowed(manager: Any, request: Any) -> bytes:
    """The tokens that may be sampled next, as vLLM's scheduler tells its workers."""
    return bytes(manager.grammar_bitmask({"r": request}, ["r"], {}).tobytes())


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = structured_output.StructuredOutputManager
    monkeypatch.setattr(manager, "_create_grammar", vars(manager)["_create_grammar"])
    resumed_grammars.install()


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_tokens_are_allowed_as_behind_generated_ones(backend: str, thinks: bool) -> None:
    manager = make_manager(backend, thinks=thinks)
    prompt, answer = (
        manager.tokenizer.encode(text, add_special_tokens=False)
        for text in (PROMPT, (THOUGHT if thinks else "") + ANSWER)
    )
    generated = begin(manager, prompt)
    seen = {find_allowed(manager, generated)}
    for num, token_id in enumerate(answer, 1):
        generated.append_output_token_ids(token_id)
        assert manager.accept_tokens(generated, [token_id])
        allowed = find_allowed(manager, generated)
        seen.add(allowed)
        given = begin(manager, prompt + answer[:num], num)
        assert find_allowed(manager, given) == allowed, manager.tokenizer.decode(answer[:num])
    assert len(seen) > 3, "it allows the same all along"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_grammar_does_not_accept_fails_the_request(backend: str) -> None:
    manager = make_manager(backend)
    wrong = manager.tokenizer.encode("no object", add_special_tokens=False)
    with pytest.raises(ValueError, match="does not accept"):
        begin(manager, [1, 2, *wrong], len(wrong))
