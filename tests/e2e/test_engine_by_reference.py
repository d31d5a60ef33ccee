"""Two engines, one attends over the other's blocks: the tokens are those of one engine alone."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers")

from baton.auth.credentials import Credentials
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest, SamplingParams
from baton.errors import PeerLostError
from tests.e2e.test_engine_handoff_agents import WAIT_TIMEOUT_S, Node, make_ticket, node
from tests.unit.engines.harness import make_model, make_prompt, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from baton.engines.interface import EngineStats
    from baton.engines.transformers.loading import LoadedModel

PROMPTS = {f"r{i}": make_prompt(20 + (37 * i) % 120, seed=i % 7) for i in range(60)}
"""Some begin as others do, some end with a block."""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@dataclass
class Pair:
    prefill: Node
    decode: Node

    def hand_over(self, name: str) -> None:
        ticket = make_ticket(self.prefill, self.decode, "reference")
        self.decode.submit(name, DecodeRequest(ticket))
        self.prefill.submit(name, PrefillRequest(ticket))

    def wait_for_ends(self) -> None:
        self.decode.wait_for_ends()
        self.prefill.wait_for_ends()

    def count(self, *, transport: str) -> int:
        return sum(trace.transport == transport for trace in self.decode.traces.values())

    def check_nothing_is_held(self) -> None:
        def is_free(stats: EngineStats) -> bool:
            return stats.num_free_blocks == stats.num_blocks and not (
                stats.num_exported_blocks or stats.num_imported_blocks
            )

        until(lambda: is_free(self.prefill.engine.stats()))
        until(lambda: is_free(self.decode.engine.stats()))


@contextmanager
def pair(
    prompts: dict[str, NDArray[np.int32]],
    prefill: dict[str, int],
    decode: dict[str, int],
    *,
    loaded: LoadedModel | None = None,
    hands_over_first_token: bool = True,
) -> Iterator[Pair]:
    key = Credentials.generate()
    with (
        node(
            "p",
            "shared",
            key,
            loaded=loaded,
            hands_over_first_token=hands_over_first_token,
            **prefill,
        ) as sender,
        node("d", "shared", key, loaded=loaded, **decode) as receiver,
    ):
        for each in (sender, receiver):
            each.prompts, each.sampling = prompts, dict.fromkeys(prompts, GREEDY)
        yield Pair(sender, receiver)


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_TIMEOUT_S / 0.01)):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to hold")


def alone(
    prompts: dict[str, NDArray[np.int32]],
    loaded: LoadedModel | None = None,
    sampling: dict[str, SamplingParams] | None = None,
) -> dict[str, list[int]]:
    with node("alone", "tcp", Credentials.generate(), num_blocks=400, loaded=loaded) as one:
        one.prompts, one.sampling = prompts, sampling or dict.fromkeys(prompts, GREEDY)
        for name in prompts:
            one.submit(name, Colocated())
        one.wait_for_ends()
        return one.answers()


@pytest.fixture(scope="module", name="expected")
def expected_fixture() -> dict[str, list[int]]:
    return alone(PROMPTS)


@pytest.mark.parametrize(("with_first_token", "num_prompts"), [(True, len(PROMPTS)), (False, 20)])
def test_many_prompts_at_once_in_small_pools(
    with_first_token: bool, num_prompts: int, expected: dict[str, list[int]]
) -> None:
    """Prefill computes in steps of 40 tokens, and shares prefixes that are lent."""
    with pair(
        PROMPTS,
        {"num_blocks": 80, "max_batch_tokens": 40, "block_size": 16},
        {"num_blocks": 12, "block_size": 16},
        hands_over_first_token=with_first_token,
    ) as both:
        for name in list(PROMPTS)[:num_prompts]:
            both.hand_over(name)
        both.wait_for_ends()
        assert both.decode.answers() == {name: expected[name] for name in both.decode.traces}
        assert both.count(transport="reference") > num_prompts // 2
        if num_prompts == len(PROMPTS):
            assert both.prefill.engine.stats().cached_prompt_tokens > 0
        both.check_nothing_is_held()


def test_who_is_preempted_gives_back_and_computes_again() -> None:
    prompts = {f"r{i}": make_prompt(60, seed=i) for i in range(6)}
    with pair(prompts, {"block_size": 16}, {"num_blocks": 10, "block_size": 16}) as both:
        long = dict.fromkeys(prompts, SamplingParams(max_tokens=90, temperature=0.0))
        both.decode.sampling = long
        for name in prompts:
            both.hand_over(name)
        both.wait_for_ends()
        assert both.decode.answers() == alone(prompts, sampling=long)
        assert both.decode.engine.stats().num_preemptions > 0
        assert both.count(transport="reference") > 1
        both.check_nothing_is_held()


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_windows_and_latent_planes_are_attended_over_too(family: str) -> None:
    loaded = prepare(make_model(family))
    prompts = {name: PROMPTS[name] for name in list(PROMPTS)[:8]}
    with pair(prompts, {"block_size": 16}, {"block_size": 16}, loaded=loaded) as both:
        for name in prompts:
            both.hand_over(name)
        both.wait_for_ends()
        assert both.decode.answers() == alone(prompts, loaded)
        assert both.count(transport="reference") == len(prompts)
        both.check_nothing_is_held()


def test_other_block_sizes_are_written_instead(expected: dict[str, list[int]]) -> None:
    names = list(PROMPTS)[:8]
    with pair(PROMPTS, {"block_size": 16}, {"block_size": 8}) as both:
        for name in names:
            both.hand_over(name)
        both.wait_for_ends()
        assert both.decode.answers() == {name: expected[name] for name in names}
        assert both.count(transport="shared") == len(names)
        reroutes = [trace.reroutes for trace in both.decode.traces.values()]
        assert all("the pages of the two workers differ" in why for [why] in reroutes)


def test_a_worker_that_has_lent_enough_writes_instead(expected: dict[str, list[int]]) -> None:
    """The largest prompt takes more than half of the lender's pool."""
    largest = max(PROMPTS, key=lambda name: len(PROMPTS[name]))
    with pair(PROMPTS, {"num_blocks": 12, "block_size": 16}, {"block_size": 16}) as both:
        both.hand_over(largest)
        both.wait_for_ends()
        assert both.decode.answers() == {largest: expected[largest]}
        trace = both.decode.traces[largest]
        assert trace.transport == "shared"
        assert "over the limit of 6" in trace.reroutes[0]
        both.check_nothing_is_held()


def test_pages_that_are_lost_while_the_link_lasts_are_attached_again(
    expected: dict[str, list[int]],
) -> None:
    names = iter(PROMPTS)
    with pair(PROMPTS, {"block_size": 16}, {"block_size": 16}) as both:

        def hand_one_over() -> str:
            name = next(names)
            both.hand_over(name)
            both.wait_for_ends()
            assert both.decode.answers()[name] == expected[name]
            return both.decode.traces[name].transport

        assert hand_one_over() == "reference"
        agent = both.decode.agent
        (exporter,) = agent.loop.importer._exporters.values()
        remote = exporter.transport._remotes[exporter.remote]
        cut = PeerLostError("cut by the test")
        agent.loop.call(lambda: remote._connection.fail(cut))
        until(lambda: exporter.remote is None)
        assert hand_one_over() == "shared"  # the link is up, and its pages are not
        until(lambda: hand_one_over() == "reference")
        both.check_nothing_is_held()


def test_what_decode_has_cached_is_not_borrowed() -> None:
    prompts = {"warm": make_prompt(40), "r": make_prompt(100)}
    with pair(prompts, {"block_size": 16}, {"block_size": 16}) as both:
        both.decode.submit("warm", Colocated())
        both.decode.wait_for_ends()
        both.hand_over("r")
        both.wait_for_ends()
        assert both.decode.answers()["r"] == alone(prompts)["r"]
        trace = both.decode.traces["r"]
        assert (trace.transport, trace.num_cached_tokens) == ("reference", 32)
        assert trace.num_received_tokens == 68
        both.check_nothing_is_held()


def test_a_client_that_leaves_gives_back_what_was_borrowed() -> None:
    prompts = {"r": make_prompt(100)}
    with pair(prompts, {"block_size": 16}, {"block_size": 16}) as both:
        both.decode.sampling = {"r": SamplingParams(max_tokens=100, ignore_eos=True)}
        both.hand_over("r")
        until(lambda: both.decode.engine.stats().num_imported_blocks == 6)
        until(lambda: both.prefill.engine.stats().num_exported_blocks == 7)  # of its next step
        both.decode.engine.cancel(next(iter(both.decode.traces)))
        both.prefill.wait_for_ends()
        both.check_nothing_is_held()


def test_a_lender_short_of_room_has_its_blocks_copied_and_returned() -> None:
    prompts = {"lent": make_prompt(100), "large": make_prompt(120, seed=1)}
    with pair(prompts, {"num_blocks": 14, "block_size": 16}, {"block_size": 16}) as both:
        long = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.0)
        both.decode.sampling = {"lent": long}
        both.hand_over("lent")
        both.prefill.wait_for_ends()
        until(lambda: both.decode.engine.stats().num_imported_blocks == 6)
        both.prefill.submit("large", Colocated())  # 8 blocks and room to grow: 7 are lent
        both.prefill.wait_for_ends()
        both.decode.wait_for_ends()
        assert both.decode.answers()["lent"][: GREEDY.max_tokens] == alone(prompts)["lent"]
        both.check_nothing_is_held()


def test_engines_have_different_pools_and_pages_do_not_start_alike() -> None:
    """Both models' layers lie at other offsets in either region."""
    prompts = {name: PROMPTS[name] for name in list(PROMPTS)[:6]}
    with pair(
        prompts, {"num_blocks": 61, "block_size": 16}, {"num_blocks": 203, "block_size": 16}
    ) as both:
        for name in prompts:
            both.hand_over(name)
        both.wait_for_ends()
        assert both.decode.answers() == alone(prompts)
        assert both.count(transport="reference") == len(prompts)
