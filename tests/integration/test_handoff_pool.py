"""Mode pool between real agents and real files, with pages of random bytes: what lands, when."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import Instant, MachineClock
from baton.config.sections import StoreSection
from baton.errors import ConfigError
from baton.handoff.dispatcher import HandoffDispatcher, open_handoffs
from baton.handoff.interface import (
    BlocksQuiescent,
    KVFailed,
    KVLanded,
    KVSent,
    ReceiveOrder,
    SampledToken,
    SendFailed,
    SendOrder,
)
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.handoff.pool_mode.block_copier import BlockCopier
from baton.handoff.pool_mode.side_entries import CompletionMarker, put_marker
from baton.handoff.pool_mode.store_access import open_store_access
from baton.handoff.pool_mode.store_handoff import MAX_SILENCE_S
from baton.ids import TicketId, WorkerId, new_epoch, new_ticket_id
from baton.kv.canonical import read_canonical
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.identity import compute_prompt_hash
from baton.kv.layout import KVLayout
from baton.store.entry_format import EntryFormat
from baton.telemetry.trace import RequestSpan
from baton.testing.clocks import ManualClock
from baton.transfer.region import allocate_shared_region, release_region, view_pages
from tests.e2e_vllm.client import wait_until
from tests.tickets import issue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent
    from baton.handoff.session.lease import Lease
    from baton.store.interface import EntryName, Tier

CLOCK = MachineClock()
KEY = Credentials.of(ClusterKey(b"k" * 32))
FIRST = SampledToken(42)
IN_STORE = 10
NUM_TOKENS = 37
PATIENCE_S = 20.0
REFS = (
    WorkerRef(WorkerId("p"), new_epoch(), "127.0.0.1:1"),
    WorkerRef(WorkerId("d"), new_epoch(), "127.0.0.1:1"),
)


def section(place: Path, **changes: object) -> StoreSection:
    shared = {"directory": str(place), "capacity_bytes": 1 << 20}
    given = {"tiers": ("shared",), "block_size": IN_STORE, "options": {"shared": shared}}
    return StoreSection(**{**given, **changes})  # type: ignore[arg-type]


@dataclass
class Node:
    """One worker without an engine, and without peers."""

    handoffs: HandoffDispatcher
    layout: KVLayout
    pages: list[NDArray[np.uint8]]
    events: list[HandoffEvent] = field(default_factory=list)
    traces: dict[TicketId, RequestSpan] = field(default_factory=dict)

    @property
    def table(self) -> BlockTable:
        return BlockTable(0, np.arange(len(self.pages[0]), dtype=np.int64))

    def read(self, start: int, stop: int) -> list[bytes]:
        here = PagedSequence(self.layout, self.table)
        return [
            read_canonical(here, layer, pages, start=start, stop=stop).tobytes()
            for layer, pages in enumerate(self.pages)
        ]

    def order(self, ticket: Ticket, prompt: NDArray[np.int32], patience_s: float) -> dict:
        trace = self.traces[ticket.id] = RequestSpan(request_id="r", worker="", epoch="", role="")
        return {
            "ticket": ticket,
            "prompt_hash": compute_prompt_hash("model", ticket.tenant_salt, prompt),
            "num_tokens": len(prompt),
            "deadline": Instant(CLOCK.now() + patience_s),
            "trace": trace,
            "prompt_ids": prompt,
        }

    def start_send(self, ticket: Ticket, prompt: NDArray[np.int32], num_ready: int = 0) -> None:
        order = self.order(ticket, prompt, PATIENCE_S)
        self.handoffs.start_send(SendOrder(**order, num_ready_tokens=num_ready, blocks=self.table))

    def start_receive(
        self,
        ticket: Ticket,
        prompt: NDArray[np.int32],
        start: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        first = start // self.layout.block_size
        blocks = BlockTable(first, self.table.blocks[first:])
        order = self.order(ticket, prompt, patience_s)
        self.handoffs.start_receive(ReceiveOrder(**order, start=start, blocks=blocks))

    def compute(self, ticket: Ticket, stop: int) -> None:
        for layer in range(self.layout.num_layers):
            self.handoffs.layer_ready([(ticket.id, stop)], layer)

    def hear(self, *kinds: type) -> list[HandoffEvent]:
        """Wait for so many events."""

        def heard() -> bool:
            self.events += self.handoffs.poll()
            return len(self.events) >= len(kinds)

        wait_until(heard, PATIENCE_S, lambda: self.events)
        assert tuple(map(type, self.events)) == kinds, self.events
        events, self.events = self.events, []
        return events


@contextmanager
def node(
    store: StoreSection,
    block_size: int,
    fill: int,
    *,
    timeout_s: float = 60.0,
    wrap: Callable[[Tier], Tier] = lambda tier: tier,
    clock: Clock = CLOCK,
) -> Iterator[Node]:
    """`wrap` is around the node's store."""
    layout = KVLayout.gqa(3, 2, 8, block_size=block_size, dtype="float32")
    shapes = [(100 // block_size, layout.page_bytes(layer)) for layer in range(3)]
    region = allocate_shared_region(shapes)
    pages = [view_pages(region.memory, array) for array in region.arrays]
    rng = np.random.default_rng(fill)
    for each in pages:
        each[:] = rng.integers(0, 256, each.shape, dtype=np.uint8)
    view = KVView(layout, region)
    pool = open_store_access(store, view, key=KEY.key, clock=clock)
    handoffs = open_handoffs(
        AgentOptions(
            worker=WorkerId("w"),
            epoch=new_epoch(),
            fingerprint="model",
            views=(view,),
            transports=(),
            credentials=KEY,
            clock=clock,
            timeout_s=timeout_s,
        ),
        pool and replace(pool, store=wrap(pool.store)),
    )
    handoffs.start(lambda: None)
    try:
        yield Node(handoffs, layout, pages)
    finally:
        handoffs.stop()
        pages.clear()
        release_region(region)


@pytest.fixture(name="pair")
def pair_fixture(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    store = section(tmp_path)
    with node(store, 4, 1) as prefill, node(store, 6, 2) as decode:
        yield prefill, decode


def make_ticket(salt: str = "") -> Ticket:
    return Ticket(new_ticket_id(), "r", *REFS, "pool", issue(60), salt)


def make_prompt(seed: int = 0, num_tokens: int = NUM_TOKENS) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)


def prefill_all(node: Node, ticket: Ticket, prompt: NDArray[np.int32]) -> None:
    node.start_send(ticket, prompt)
    node.compute(ticket, len(prompt))
    node.handoffs.prefill_done(ticket.id, FIRST)
    node.hear(KVSent)


def entries(place: Path) -> list[Path]:
    """The files of entries, the largest first: notes are smaller than any body here."""
    found = [path for path in place.glob("baton-*-store/*") if len(path.name) == 64]
    return sorted(found, key=lambda path: -path.stat().st_size)


def test_decode_that_comes_later_finds_all_and_the_first_token(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    ticket, prompt = make_ticket(), make_prompt()
    prefill_all(prefill, ticket, prompt)
    decode.start_receive(ticket, prompt)
    assert decode.hear(KVLanded) == [KVLanded(ticket.id, FIRST)]
    assert decode.read(0, NUM_TOKENS) == prefill.read(0, NUM_TOKENS)


def test_decode_that_comes_first_waits_block_by_block(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    ticket, prompt = make_ticket(), make_prompt()
    decode.start_receive(ticket, prompt)
    prefill.start_send(ticket, prompt, num_ready=12)
    for stop in (20, 29, NUM_TOKENS):
        prefill.compute(ticket, stop)
        full_layout = stop - stop % IN_STORE
        wait_until(
            lambda full_layout=full_layout: (
                decode.read(0, full_layout) == prefill.read(0, full_layout)
            ),
            PATIENCE_S,
        )
        assert stop == NUM_TOKENS or decode.handoffs.poll() == []
    # All is there before the first token is: that is computed anew rather than waited for.
    assert decode.hear(KVLanded) == [KVLanded(ticket.id, None)]
    prefill.handoffs.prefill_done(ticket.id, None)
    prefill.hear(KVSent)
    assert decode.read(0, NUM_TOKENS) == prefill.read(0, NUM_TOKENS)


def test_what_is_cached_is_not_read_and_what_is_kept_not_written_again(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    prefill, decode = pair
    first, second, prompt = make_ticket(), make_ticket(), make_prompt()
    prefill_all(prefill, first, prompt)
    inodes = {path.stat().st_ino for path in entries(tmp_path)[:4]}
    before = decode.read(0, 12)
    decode.start_receive(first, prompt, start=12)
    decode.hear(KVLanded)
    assert decode.read(0, 12) == before
    assert decode.read(12, NUM_TOKENS) == prefill.read(12, NUM_TOKENS)
    token_bytes = decode.layout.bytes_per_token
    assert decode.traces[first.id].num_bytes == (NUM_TOKENS - IN_STORE) * token_bytes
    prefill_all(prefill, second, prompt)
    assert prefill.traces[first.id].num_bytes == NUM_TOKENS * token_bytes
    assert prefill.traces[second.id].num_bytes == 0
    assert {path.stat().st_ino for path in entries(tmp_path)[:4]} == inodes


@pytest.mark.parametrize("spoil", ["unlink", "flip"])
def test_what_is_lost_before_it_is_read_is_computed(
    pair: tuple[Node, Node], tmp_path: Path, spoil: str
) -> None:
    prefill, decode = pair
    ticket, prompt = make_ticket(), make_prompt()
    stem = prompt[:30]
    prefill_all(prefill, make_ticket(), stem)
    known = set(entries(tmp_path))
    prefill_all(prefill, ticket, prompt)
    (tail,) = [p for p in set(entries(tmp_path)) - known if p.stat().st_size > 1000]
    if spoil == "unlink":
        tail.unlink()
    else:
        with tail.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes((byte ^ 1,)))
    decode.start_receive(ticket, prompt)
    assert decode.hear(KVLanded) == [KVLanded(ticket.id, None, 30)]
    assert decode.read(0, 30) == prefill.read(0, 30)
    assert not tail.exists()


def test_nothing_at_all_fails_as_soon_as_prefill_is_over(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    prefill, decode = pair
    ticket, prompt = make_ticket(), make_prompt()
    decode.start_receive(ticket, prompt)
    prefill.start_send(ticket, prompt)
    prefill.handoffs.abort(ticket.id, "its client left")
    prefill.hear(SendFailed)
    failed, quiescent = decode.hear(KVFailed, BlocksQuiescent)
    assert "its client left" in str(failed.error)
    assert quiescent == BlocksQuiescent(ticket.id)
    assert entries(tmp_path) == [], "the note is left behind"


@pytest.mark.parametrize("is_early", [True, False])
def test_decode_is_told_that_prefill_failed(pair: tuple[Node, Node], is_early: bool) -> None:
    prefill, decode = pair
    known, ticket, prompt = make_ticket(), make_ticket(), make_prompt()
    prefill_all(prefill, known, prompt[:20])
    if is_early:
        decode.handoffs.abort_from_peer(ticket.id, "killed")
        decode.start_receive(ticket, prompt)
    else:
        decode.start_receive(ticket, prompt)
        wait_until(lambda: decode.read(0, 20) == prefill.read(0, 20), PATIENCE_S)
        decode.handoffs.abort_from_peer(ticket.id, "killed")
    assert decode.hear(KVLanded) == [KVLanded(ticket.id, None, 20)]


def test_the_deadline_ends_the_wait(pair: tuple[Node, Node]) -> None:
    _, decode = pair
    ticket = make_ticket()
    decode.start_receive(ticket, make_prompt(), patience_s=0.05)
    failed, _ = decode.hear(KVFailed, BlocksQuiescent)
    assert "deadline" in str(failed.error)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_queue_is_waited_for_as_long_as_its_engine_lives(
    tmp_path: Path, *, is_stuck: bool
) -> None:
    """The two never meet: signs of life go through the store."""
    store, timeout_s = section(tmp_path), 1.5
    with (
        node(store, 4, 1, timeout_s=timeout_s) as prefill,
        node(store, 6, 2, timeout_s=timeout_s) as decode,
    ):
        ticket, prompt = make_ticket(), make_prompt()
        begun = CLOCK.now()
        decode.start_receive(ticket, prompt)
        prefill.start_send(ticket, prompt)
        while CLOCK.now() < begun + 2.5 * timeout_s:
            assert prefill.handoffs.poll() == decode.handoffs.poll() == []
            prefill.handoffs.report_progress([ticket])
            threading.Event().wait(0.1)
        if is_stuck:
            failed, _ = decode.hear(KVFailed, BlocksQuiescent)
            assert "deadline" in str(failed.error)
            assert CLOCK.now() < begun + PATIENCE_S, "it waited for the request's own deadline"
            prefill.hear(SendFailed)
        else:
            prefill.compute(ticket, len(prompt))
            prefill.handoffs.prefill_done(ticket.id, FIRST)
            prefill.hear(KVSent)
            decode.hear(KVLanded)
            assert decode.read(0, NUM_TOKENS) == prefill.read(0, NUM_TOKENS)


class Watched:
    """A store that counts how often its thread has looked for something."""

    def __init__(self, inner: Tier) -> None:
        self._inner, self._num_looks = inner, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def find(self, names: Sequence[EntryName]) -> int:
        self._num_looks += 1
        return self._inner.find(names)

    def wait_for_step(self) -> None:
        """Wait until all that was asked for and all that has come since was seen."""
        enough = self._num_looks + 10  # two or three in each step
        wait_until(lambda: self._num_looks >= enough, PATIENCE_S)


@dataclass
class Waiting:
    """A decode worker whose time stands still waits for a prompt of which nothing is stored."""

    prefill: Node
    decode: Node
    ticket: Ticket
    prompt: NDArray[np.int32]
    clock: ManualClock
    store: Watched

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.store.wait_for_step()


@pytest.fixture(name="waiting")
def waiting_fixture(tmp_path: Path) -> Iterator[Waiting]:
    store, clock, watched = section(tmp_path), ManualClock(), list[Watched]()

    def watch(tier: Tier) -> Tier:
        watched.append(Watched(tier))
        return watched[0]  # type: ignore[return-value]

    with node(store, 4, 1) as prefill, node(store, 6, 2, clock=clock, wrap=watch) as decode:
        ticket, prompt = make_ticket(), make_prompt()
        decode.start_receive(ticket, prompt)
        watched[0].wait_for_step()
        yield Waiting(prefill, decode, ticket, prompt, clock, watched[0])


def test_a_prompt_of_which_all_was_evicted_is_not_waited_for(waiting: Waiting) -> None:
    """Its marker, too: decode is asked once prefill is done, and finds neither."""
    waiting.pass_time(0.9 * MAX_SILENCE_S)
    assert waiting.decode.handoffs.poll() == []
    waiting.clock.advance(0.2 * MAX_SILENCE_S)
    failed, _ = waiting.decode.hear(KVFailed, BlocksQuiescent)
    assert isinstance(failed, KVFailed)
    assert (failed.error.stage, "no more" in str(failed.error)) == ("store", True)


def test_what_follows_an_entry_is_waited_for_as_long(waiting: Waiting) -> None:
    decode, ticket, num_tokens = waiting.decode, waiting.ticket, 2 * IN_STORE
    waiting.pass_time(0.9 * MAX_SILENCE_S)
    waiting.prefill.start_send(ticket, waiting.prompt)
    waiting.prefill.compute(ticket, num_tokens)
    num_bytes, trace = num_tokens * decode.layout.bytes_per_token, decode.traces[ticket.id]
    wait_until(lambda: trace.num_bytes == num_bytes, PATIENCE_S)
    waiting.pass_time(0.9 * MAX_SILENCE_S)
    assert decode.handoffs.poll() == []
    waiting.clock.advance(0.2 * MAX_SILENCE_S)
    assert decode.hear(KVLanded) == [KVLanded(ticket.id, None, num_tokens)]
    assert waiting.prefill.handoffs.poll() == [], "it was waited for until prefill gave up"


def test_a_prompt_that_is_queued_at_its_prefill_worker_is_waited_for(
    waiting: Waiting, tmp_path: Path
) -> None:
    waiting.prefill.handoffs.report_progress([waiting.ticket])
    wait_until(lambda: entries(tmp_path), PATIENCE_S)
    for _ in range(3):
        waiting.pass_time(0.9 * MAX_SILENCE_S)
    assert waiting.decode.handoffs.poll() == []
    prefill_all(waiting.prefill, waiting.ticket, waiting.prompt)
    assert waiting.decode.hear(KVLanded) == [KVLanded(waiting.ticket.id, FIRST)]


def test_an_aborted_wait_gives_the_blocks_back_once(pair: tuple[Node, Node]) -> None:
    _, decode = pair
    ticket = make_ticket()
    decode.start_receive(ticket, make_prompt())
    decode.handoffs.abort(ticket.id, "the client left")
    decode.handoffs.abort(ticket.id, "again")
    decode.hear(BlocksQuiescent)
    assert decode.handoffs.poll() == []


class Emptied:
    """A store from which all goes, notes too, as soon as one entry was opened."""

    def __init__(self, inner: Tier, place: Path) -> None:
        self._inner, self._place = inner, place
        self.find, self.find_runs = inner.find, inner.find_runs
        self.put, self.discard = inner.put, inner.discard
        self.usage, self.close = inner.usage, inner.close
        self.promote_waiting = inner.promote_waiting

    def try_lease(self, name: EntryName) -> Lease | None:
        lease = self._inner.try_lease(name)
        if lease is not None and lease.num_bytes > 1000:
            for path in entries(self._place):
                path.unlink()
        return lease


@pytest.mark.parametrize("failed_rank", [0, 1])
def test_a_rank_that_failed_is_reported_whichever_it_is(tmp_path: Path, failed_rank: int) -> None:
    with node(section(tmp_path, num_parts=2), 4, 1) as decode:
        ticket, prompt = make_ticket(), make_prompt()
        pool = decode.handoffs.store
        assert pool is not None
        prompt_hash = compute_prompt_hash("model", "", prompt)
        for rank in range(2):
            reason = "its GPU failed" if rank == failed_rank else ""
            marker = CompletionMarker(prompt_hash, 0, None, reason)
            put_marker(pool.access.store, ticket.id, rank, marker)
        decode.start_receive(ticket, prompt)
        failed, _ = decode.hear(KVFailed, BlocksQuiescent)
        assert isinstance(failed, KVFailed)
        assert (failed.error.stage, "GPU failed" in str(failed.error)) == ("prefill", True)


def test_what_goes_together_with_its_note_is_not_waited_for(tmp_path: Path) -> None:
    store = section(tmp_path)
    with (
        node(store, 4, 1) as prefill,
        node(store, 6, 2, wrap=lambda tier: Emptied(tier, tmp_path)) as decode,
    ):
        ticket, prompt = make_ticket(), make_prompt()
        prefill_all(prefill, ticket, prompt)
        decode.start_receive(ticket, prompt, patience_s=10 * PATIENCE_S)
        assert decode.hear(KVLanded) == [KVLanded(ticket.id, None, IN_STORE)]
        assert decode.read(0, IN_STORE) == prefill.read(0, IN_STORE)


class Undiscarding:
    """A store whose `discard` fails in a way that no tier should."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def discard(self, name: EntryName) -> None:
        raise RuntimeError("cannot discard")


def test_an_unexpected_error_ends_neither_the_thread_nor_a_wait(tmp_path: Path) -> None:
    store = section(tmp_path)
    with node(store, 4, 1) as prefill, node(store, 6, 2, wrap=Undiscarding) as decode:
        prompt = make_prompt()
        for _ in range(2):
            ticket = make_ticket()
            prefill_all(prefill, ticket, prompt)
            decode.start_receive(ticket, prompt)
            assert decode.hear(KVLanded) == [KVLanded(ticket.id, FIRST)]
        ticket = make_ticket()
        decode.start_receive(ticket, make_prompt(1))
        decode.handoffs.abort(ticket.id, "the client left")
        decode.hear(BlocksQuiescent)


class Hanging:
    """A store whose puts wait."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self.is_putting, self.may_put = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put_many(self, *args: Any) -> object:
        self.is_putting.set()
        assert self.may_put.wait(PATIENCE_S)
        return self._inner.put_many(*args)


def test_blocks_that_were_taken_back_while_the_store_hung_are_not_read(tmp_path: Path) -> None:
    """What another request has written into them meanwhile is not kept as KV of the prompt."""
    store, hanging = section(tmp_path), []

    def wrap(tier: Tier) -> Tier:
        hanging.append(Hanging(tier))
        return hanging[0]

    with node(store, 4, 1, wrap=wrap) as prefill, node(store, 6, 2) as decode:
        ahead, cut = make_ticket(), make_ticket()
        prompts = {ahead: make_prompt(), cut: make_prompt(1)}
        for ticket, prompt in prompts.items():
            prefill.start_send(ticket, prompt)
        for layer in range(prefill.layout.num_layers):
            prefill.handoffs.layer_ready([(each.id, IN_STORE) for each in prompts], layer)
        assert hanging[0].is_putting.wait(PATIENCE_S)
        prefill.handoffs.abort(cut.id, "preempted")
        prefill.handoffs.cut_writes(cut.id)
        for pages in prefill.pages:
            pages[:] = 0
        hanging[0].may_put.set()
        prefill.hear(SendFailed)
        decode.start_receive(cut, prompts[cut])
        failed, _ = decode.hear(KVFailed, BlocksQuiescent)
        assert "taken back" in str(failed.error)
        assert not prefill.handoffs.store._guards.keys() - {ahead.id}


def test_an_order_that_cannot_be_carried_out_is_answered(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    wide = {"prompt_ids": make_prompt().astype(np.int64) + (1 << 40)}
    order = prefill.order(make_ticket(), make_prompt(), PATIENCE_S) | wide
    prefill.handoffs.start_send(SendOrder(**order, num_ready_tokens=0, blocks=prefill.table))
    prefill.hear(SendFailed)
    order = decode.order(make_ticket(), make_prompt(), PATIENCE_S) | wide
    decode.handoffs.start_receive(ReceiveOrder(**order, start=0, blocks=decode.table))
    decode.hear(KVFailed, BlocksQuiescent)
    ticket, prompt = make_ticket(), make_prompt()
    prefill_all(prefill, ticket, prompt)
    decode.start_receive(ticket, prompt)
    assert decode.hear(KVLanded) == [KVLanded(ticket.id, FIRST)]


def test_another_tenant_or_prompt_finds_nothing(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    prompt = make_prompt()
    prefill_all(prefill, make_ticket("one"), prompt)
    for ticket, wanted in ((make_ticket("two"), prompt), (make_ticket("one"), make_prompt(1))):
        decode.start_receive(ticket, wanted, patience_s=0.05)
        decode.hear(KVFailed, BlocksQuiescent)


def test_a_store_without_room_fails_the_prefill_at_once(tmp_path: Path) -> None:
    tiny = {"shared": {"directory": str(tmp_path), "capacity_bytes": 2048}}
    with node(section(tmp_path, options=tiny), 4, 1) as prefill:
        ticket, prompt = make_ticket(), make_prompt()
        prefill.start_send(ticket, prompt)
        prefill.compute(ticket, IN_STORE)
        (failed,) = prefill.hear(SendFailed)
        assert failed.error.stage == "store"


def test_a_prompt_larger_than_the_store_is_not_waited_for(tmp_path: Path) -> None:
    small = {"shared": {"directory": str(tmp_path), "capacity_bytes": 16_384}}
    store = section(tmp_path, options=small)
    with node(store, 4, 1) as prefill, node(store, 6, 2) as decode:
        ticket, prompt = make_ticket(), make_prompt(num_tokens=90)
        prefill_all(prefill, ticket, prompt)
        decode.start_receive(ticket, prompt)
        failed, _ = decode.hear(KVFailed, BlocksQuiescent)
        assert "no more" in str(failed.error)


def test_an_order_that_does_not_name_its_tokens_fails(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    ticket, prompt = make_ticket(), make_prompt()
    for wrong in (None, prompt[:-1]):
        blocks = decode.table
        order = decode.order(ticket, prompt, PATIENCE_S) | {"prompt_ids": wrong}
        decode.handoffs.start_receive(ReceiveOrder(**order, start=0, blocks=blocks))
        decode.hear(KVFailed, BlocksQuiescent)
        prefill.handoffs.start_send(SendOrder(**order, num_ready_tokens=0, blocks=prefill.table))
        prefill.hear(SendFailed)


def test_stopping_ends_every_handoff(tmp_path: Path) -> None:
    with node(section(tmp_path), 4, 1) as both:
        sent, wanted = make_ticket(), make_ticket()
        both.start_send(sent, make_prompt())
        both.start_receive(wanted, make_prompt())
        both.handoffs.stop()
        both.hear(SendFailed, KVFailed, BlocksQuiescent)


def test_without_a_store_the_mode_fails_at_once() -> None:
    with node(StoreSection(), 4, 1) as both:
        both.start_receive(make_ticket(), make_prompt())
        failed, _ = both.hear(KVFailed, BlocksQuiescent)
        assert "no store" in str(failed.error)
        both.start_send(make_ticket(), make_prompt())
        both.hear(SendFailed)


def test_pages_that_cannot_be_divided_are_refused() -> None:
    layout = KVLayout.gqa(3, 2, 8, block_size=4, dtype="float32")
    opaque = KVLayout(layout.layers, 4, "float32", "opaque", arrangement="vllm-cpu/vec/LBHNC")
    region = allocate_shared_region([(4, layout.page_bytes(layer)) for layer in range(3)])
    entry_format = EntryFormat.of(layout, block_size=4, num_parts=1)
    with pytest.raises(ConfigError, match="cannot be kept"):
        BlockCopier(KVView(opaque, region), entry_format)
    release_region(region)
