"""Mode pool between real engines: the oracle's tokens, through a store of real files."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers")

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import MachineClock
from baton.encodings.interface import ENCODINGS
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest
from baton.engines.transformers.engine import TransformersEngine
from baton.engines.transformers.options import TransformersOptions
from baton.handoff.dispatcher import open_handoffs
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.handoff.pool_mode.store_access import (
    StoreAccess,
    label_tenant,
    name_encodings,
    report_to,
)
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.store.entry_format import EntryFormat
from baton.store.interface import PeerAccess
from baton.store.tiered import open_store
from tests.e2e.test_engine_handoff_agents import (
    NUM_PROMPTS,
    PROMPTS,
    SAMPLING,
    WAIT_TIMEOUT_S,
    Node,
)
from tests.free_ports import find_free_port
from tests.tickets import issue
from tests.unit.engines.harness import tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.store.tiered import TieredStore

CLOCK = MachineClock()
KEY = Credentials.of(ClusterKey(b"k" * 32))


def open_tiers(place: Path, tiers: dict[str, dict[str, object]] | None = None) -> TieredStore:
    """The store of one worker: `shared` and `file` of a place, or other tiers."""
    tiers = tiers or {
        "shared": {"directory": str(place), "capacity_bytes": 1 << 20},
        "file": {"directory": str(place / "files")},
    }
    return open_store(
        tuple(tiers),
        tiers,
        key=bytes(32),
        cluster="test",
        clock=CLOCK,
        peers=PeerAccess(KEY, serves=True),
    )


@contextmanager
def pooled(
    name: str,
    place: Path,
    *,
    store_block_size: int = 16,
    prefixes: bool = False,
    encoding: str = "raw",
    tiers: dict[str, dict[str, object]] | None = None,
    **options: float,
) -> Iterator[Node]:
    """A worker that reaches no other: no transports, nothing but the store.

    `tiers`: see `open_tiers`.
    """
    engine = TransformersEngine(
        TransformersOptions(**{"num_blocks": 200, "num_threads": 1} | options),
        tiny_llama(),
        path="nowhere",
        clock=CLOCK,
    )
    store = open_tiers(place, tiers)
    layout = engine.info.layout
    written = ENCODINGS.build(encoding, {})
    entry_format = EntryFormat.of(
        layout, block_size=store_block_size, num_parts=1, encodings=name_encodings(written, ())
    )
    epoch = new_epoch()
    view = KVView(layout, engine.region)
    handoffs = open_handoffs(
        AgentOptions(
            worker=WorkerId(name),
            epoch=epoch,
            fingerprint=engine.info.fingerprint,
            views=(view,),
            transports=(),
            credentials=KEY,
            clock=CLOCK,
            timeout_s=WAIT_TIMEOUT_S,
        ),
        report_to(
            engine.journal,
            StoreAccess(
                store,
                entry_format,
                view,
                partial(label_tenant, KEY.key),
                written,
                keeps_prefixes=prefixes,
            ),
            fingerprint=engine.info.fingerprint,
            clock=CLOCK,
        ),
    )
    running = Node(engine, handoffs, WorkerRef(WorkerId(name), epoch, ""))
    try:
        yield running
    finally:
        handoffs.stop()
        engine.stop(WAIT_TIMEOUT_S)


def make_ticket(prefill: Node, decode: Node) -> Ticket:
    nowhere = "127.0.0.1:1"  # nobody dials it
    refs = (WorkerRef(node.ref.worker, node.ref.epoch, nowhere) for node in (prefill, decode))
    return Ticket(new_ticket_id(), "r", *refs, "pool", issue(WAIT_TIMEOUT_S))


@pytest.fixture(scope="module", name="expected")
def expected_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    with pooled("alone", tmp_path_factory.mktemp("store")) as alone:
        for name in PROMPTS:
            alone.submit(name, Colocated())
        alone.wait_for_ends()
        return alone.answers()


@pytest.mark.parametrize("block_sizes", [(16, 16, 16), (24, 16, 64), (16, 24, 10), (8, 8, 256)])
@pytest.mark.parametrize("waits", [True, False])
def test_many_requests_through_the_store_give_the_tokens_of_one_engine_alone(
    block_sizes: tuple[int, int, int],
    waits: bool,
    expected: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    on_prefill, on_decode, in_store = block_sizes
    with ExitStack() as nodes:
        prefill, decode = (
            nodes.enter_context(
                pooled(
                    name, tmp_path, store_block_size=in_store, block_size=size, max_batch_tokens=40
                )
            )
            for name, size in (("p", on_prefill), ("d", on_decode))
        )
        tickets = {name: make_ticket(prefill, decode) for name in PROMPTS}
        for name, ticket in tickets.items():
            if waits:  # decode is there first, and looks for what is not there yet
                decode.submit(name, DecodeRequest(ticket))
            prefill.submit(name, PrefillRequest(ticket))
        if not waits:
            prefill.wait_for_ends()
            for name, ticket in tickets.items():
                decode.submit(name, DecodeRequest(ticket))
        decode.wait_for_ends()
        prefill.wait_for_ends()
        assert decode.answers() == expected
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * NUM_PROMPTS
        received = {name: trace.num_received_tokens for name, trace in decode.traces.items()}
        cached = {name: trace.num_cached_tokens for name, trace in decode.traces.items()}
        full_layout = {
            name: len(prompt)
            for name, prompt in PROMPTS.items()
            if len(prompt) - cached[name] >= on_decode  # else it is computed, not received
        }
        assert {name: received[name] + cached[name] for name in full_layout} == full_layout
        assert len(full_layout) > NUM_PROMPTS // 2
        check_counts(prefill, decode)


def check_counts(prefill: Node, decode: Node) -> None:
    """What came was counted; what was waited for is no miss."""
    kept, taken = (node.agent.store.access for node in (prefill, decode))
    assert kept is not None
    assert taken is not None
    assert kept.counts.num_stored > 0
    assert (taken.counts.num_missing, kept.counts.num_loaded) == (0, 0)
    assert taken.counts.num_loaded > 0
    _, last = taken.store.reports()
    assert last.counts.num_misses == 0


def listening_pair() -> list[dict[str, dict[str, object]]]:
    """Tiers of two workers of two hosts: each has its own memory and reads the other's."""
    own, other = find_free_port(), find_free_port()
    return [
        {
            "host": {"listen": f"127.0.0.1:{first}"},
            "peer": {"urls": [f"tcp://127.0.0.1:{second}"], "timeout_s": 10.0},
        }
        for first, second in ((own, other), (other, own))
    ]


@pytest.mark.parametrize("waits", [True, False])
def test_many_requests_through_the_memory_of_the_prefill_worker(
    waits: bool, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    of_prefill, of_decode = listening_pair()
    with ExitStack() as nodes:
        prefill = nodes.enter_context(pooled("p", tmp_path, tiers=of_prefill))
        decode = nodes.enter_context(pooled("d", tmp_path, tiers=of_decode))
        tickets = {name: make_ticket(prefill, decode) for name in PROMPTS}
        for name, ticket in tickets.items():
            if waits:
                decode.submit(name, DecodeRequest(ticket))
            prefill.submit(name, PrefillRequest(ticket))
        if not waits:
            prefill.wait_for_ends()
            for name, ticket in tickets.items():
                decode.submit(name, DecodeRequest(ticket))
        decode.wait_for_ends()
        prefill.wait_for_ends()
        assert decode.answers() == expected
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * NUM_PROMPTS
        assert sum(trace.num_received_tokens for trace in decode.traces.values()) > 0
        own, _ = prefill.agent.store.access.store.reports()
        assert own.usage.peers.num_read > NUM_PROMPTS
        assert own.usage.peers.num_written == 0


def test_what_is_computed_once_is_written_once_and_read_by_each_decode_worker(
    expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """One system prompt, or one request with several answers on several workers."""
    prompt = next(name for name in PROMPTS if len(PROMPTS[name]) > 100)
    with ExitStack() as nodes:
        place = {"shared": {"directory": str(tmp_path), "capacity_bytes": 16 << 20}}
        prefill, *decodes = (
            nodes.enter_context(pooled(name, tmp_path, tiers=place))
            for name in ("p", "d", "e", "f")
        )
        prefill.prompts = {f"{prompt} {at}": PROMPTS[prompt] for at in range(len(decodes))}
        prefill.sampling = dict.fromkeys(prefill.prompts, SAMPLING[prompt])
        for at, decode in enumerate(decodes):
            ticket = make_ticket(prefill, decode)
            prefill.submit(f"{prompt} {at}", PrefillRequest(ticket))
            prefill.wait_for_ends()
            decode.submit(prompt, DecodeRequest(ticket))
            decode.wait_for_ends()
            assert decode.answers() == {prompt: expected[prompt]}
            assert decode.traces[prompt].num_received_tokens == len(PROMPTS[prompt])
        access = prefill.agent.store.access
        num_tokens, size = len(PROMPTS[prompt]), access.entry_format.block_size
        num_entries = -(-num_tokens // size)
        kv_bytes = access.entry_format.part_layout(0).bytes_per_token * num_tokens
        assert access.counts.num_stored == num_entries
        assert access.counts.num_present == num_entries * (len(decodes) - 1)
        [written] = (tier.counts for tier in access.store.reports())
        few_bytes = 1000  # markers and heartbeats
        assert kv_bytes <= written.written_bytes < kv_bytes + few_bytes
        for decode in decodes:
            [taken] = (tier.counts for tier in decode.agent.store.access.store.reports())
            assert kv_bytes <= taken.read_bytes < kv_bytes + few_bytes
            assert taken.num_stored == 0
