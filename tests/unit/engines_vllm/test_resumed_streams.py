"""Which requests can go on from token ids, by vLLM's own parameters."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.vllm import resumed_streams
from baton.engines.vllm.resumed_streams import CARRIED_ON, find_obstacle, restore
from baton.engines.vllm.stream_tokens import StreamTokens
from tests.lazy_modules import LazyModule, skip_without_vllm

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports

skip_without_vllm()

sampling_params = LazyModule("vllm.sampling_params")
logits_processors = LazyModule("vllm.v1.sample.logits_processor")

TOKENS = {"type": "token", "prompt_token_ids": [1, 2]}
GOES_ON: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    {"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4]},
    {"stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "max_tokens": 9, "min_tokens": 2},
    {"structured_outputs": lambda: sampling_params.StructuredOutputsParams(regex="a")},
    {
        "extra_args": {"kv_transfer_params": {}},
        "output_kind": lambda: sampling_params.RequestOutputKind.DELTA,
    },
]
STAYS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 7},
    "n": {"n": 2},
    "presence_penalty": {"presence_penalty": 0.1},
    "frequency_penalty": {"frequency_penalty": -0.1},
    "logprobs": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "bad_words": {"bad_words": ["no"]},
    "thinking_token_budget": {"thinking_token_budget": 9},
    "repetition_detection": {
        "repetition_detection": lambda: sampling_params.RepetitionDetectionParams(
            max_pattern_size=2, min_count=3
        )
    },
}


def make_params(**fields: Any) -> Any:
    """Values that are functions are called: they need vLLM."""
    called = {name: value() if callable(value) else value for name, value in fields.items()}
    return sampling_params.SamplingParams(**called)


def test_the_parameters_that_are_carried_on_are_vllms() -> None:
    assert set(sampling_params.SamplingParams.__struct_fields__) >= CARRIED_ON


@pytest.mark.parametrize("fields", GOES_ON)
def test_what_depends_on_all_tokens_before_it_goes_on(fields: dict[str, Any]) -> None:
    assert find_obstacle(make_params(**fields), None, TOKENS) is None


@pytest.mark.parametrize("name", STAYS)
def test_what_depends_on_the_answer_alone_does_not(name: str) -> None:
    assert find_obstacle(make_params(**STAYS[name]), None, TOKENS) == name


def test_neither_adapters_nor_images_go_on() -> None:
    assert find_obstacle(make_params(), object(), TOKENS) == "LoRA"
    assert find_obstacle(make_params(), None, {"type": "multimodal"}) is not None
    assert find_obstacle(make_params(), None, "text") is not None


@pytest.mark.parametrize("installed", [(), ("an entry point",)])
def test_with_logits_processors_that_vllm_loads_unasked_streams_do_not_go_on(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...]
) -> None:
    asked = []
    monkeypatch.setattr(
        resumed_streams, "entry_points", lambda group: asked.append(group) or installed
    )
    resumed_streams._has_plugins.cache_clear()
    engine = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=None), vllm_config=SimpleNamespace()
    )
    assert resumed_streams._is_plain(engine) is not bool(installed)
    resumed_streams._has_plugins.cache_clear()
    assert asked == [logits_processors.LOGITSPROCS_GROUP]


class RecordedState:
    """As vLLM's `RequestState`: what it is given, in the order in which that comes."""

    def __init__(self) -> None:
        self.detokenizer = self
        self.given: list[object] = []

    def update(self, token_ids: list[int], stop_terminated: bool) -> None:
        assert not stop_terminated
        self.given.append(token_ids)

    def make_request_output(self, token_ids: list[int], *_: object) -> list[int]:
        return token_ids


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([2, 1], [[5, 6], [7]]),
        (None, [[5], [6], [7]]),
        ([2, 2], [[5], [6], [7]]),  # not of these tokens
    ],
)
def test_an_answer_is_restored_in_the_groups_in_which_it_was_generated(
    sizes: list[int] | None, groups: list[list[int]]
) -> None:
    resume = {"token_ids": [5, 6, 7]} | ({} if sizes is None else {"group_sizes": sizes})
    params = make_params(extra_args={"kv_transfer_params": {"baton_resume": resume}})
    state = RecordedState()
    given, read = resumed_streams._take_given(params, 100)
    assert restore(state, given, read) == state.given == groups


def test_tokens_without_events_are_named_after_a_few() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    async def generate() -> AsyncGenerator[Any, None]:
        for number in range(12):
            output = SimpleNamespace(token_ids=[number])
            yield SimpleNamespace(outputs=[output], finished=number == 11)

    async def read_all() -> list[int]:
        stream = StreamTokens(send=send)
        stream.begin((), 9)
        return [
            o.outputs[0].token_ids[0] async for o in resumed_streams._report(stream, generate())
        ]

    assert asyncio.run(read_all()) == list(range(12))
    assert sent == [b":0,1,2,3,", b"4,5,6,7,"]
