"""Workers without an engine: a real agent, real links and transports, and pages of random bytes."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from baton.auth.ticket import WorkerRef, seal, unseal
from baton.clock import Clock, MachineClock
from baton.handoff.agent import HandoffAgent
from baton.handoff.interface import (
    HandoffEvent,
    KVLanded,
    KVSent,
    ReceiveOrder,
    SampledToken,
    SendOrder,
    TokenLogprob,
)
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.handoff.peer_transports import LinkOptions
from baton.handoff.verify import VerificationPolicy
from baton.ids import Epoch, WorkerId, new_epoch
from baton.kv.canonical import read_canonical, write_canonical
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.layout import KVLayout
from baton.telemetry.trace import Stamp
from baton.transfer.interface import TRANSPORTS, PagedRegion, Transport, TransportContext
from baton.transfer.region import allocate_shared_region, release_region, view_pages
from baton.transfer.transports.tcp.transport import TcpTransport
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import HandoffMode
    from baton.handoff.messages import TransferOp
    from baton.handoff.options import WriteLease
    from baton.transfer.interface import TransportFactory
    from baton.transfer.links.choice import LinkObserver

CLOCK = MachineClock()
NUM_LAYERS = 3
NUM_BLOCKS = 32
LISTED = LinkOptions("listed")
"""Nothing is measured: what is used depends on the order alone."""
WRITES_ONLY = msgspec.structs.replace(TcpTransport.capabilities, reads=False)
"""Of a `TcpTransport` as a transport that cannot read."""
FIRST = SampledToken(42, -0.5, (TokenLogprob(42, -0.5),))


def make_layout(block_size: int) -> KVLayout:
    return KVLayout.gqa(NUM_LAYERS, 2, 8, block_size=block_size, dtype="float32")


@dataclass(frozen=True)
class ConvertedPages:
    """A `Staging`: the engine's pages (`own`) in `layout`, the face's in canonical order."""

    layout: KVLayout
    own: list[NDArray[np.uint8]]
    face_layout: KVLayout
    region: PagedRegion

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: object = None,
    ) -> None:
        source, target = self._sequences(blocks, staged)
        stop = len(blocks) * self.layout.block_size
        data = read_canonical(source, layer, self.own[layer], start=0, stop=stop)
        write_canonical(target, layer, self._staged(layer), data, start=0)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: object = None,
    ) -> None:
        target, source = self._sequences(blocks, staged)
        stop = len(blocks) * self.layout.block_size
        data = read_canonical(source, layer, self._staged(layer), start=0, stop=stop)
        write_canonical(target, layer, self.own[layer], data, start=0)

    def _sequences(
        self, blocks: NDArray[np.int64], staged: NDArray[np.int64]
    ) -> tuple[PagedSequence, PagedSequence]:
        assert len(blocks) == len(staged)
        return (
            PagedSequence(self.layout, BlockTable(0, blocks)),
            PagedSequence(self.face_layout, BlockTable(0, staged)),
        )

    def _staged(self, layer: int) -> NDArray[np.uint8]:
        return view_pages(self.region.memory, self.region.arrays[layer])


@dataclass(frozen=True)
class Pages:
    """An engine's own pages, `[num_blocks, page_bytes]` for each layer, and how it shows them."""

    layout: KVLayout
    own: list[NDArray[np.uint8]]
    views: tuple[KVView, ...]


@contextmanager
def plain_pages(layout: KVLayout) -> Iterator[Pages]:
    """Pages that peers reach themselves."""
    region = _allocate(layout, NUM_BLOCKS)
    own = [view_pages(region.memory, array) for array in region.arrays]
    try:
        yield Pages(layout, own, (KVView(layout, region),))
    finally:
        own.clear()
        release_region(region)


@contextmanager
def staged_pages(layout: KVLayout, num_staging_pages: int) -> Iterator[Pages]:
    """Pages of the engine's own memory, shown in canonical order through staging."""
    face_layout = msgspec.structs.replace(layout, order="canonical")
    region = _allocate(face_layout, num_staging_pages)
    own = [
        np.zeros((NUM_BLOCKS, layout.page_bytes(layer)), dtype=np.uint8)
        for layer in range(layout.num_layers)
    ]
    staging = ConvertedPages(layout, own, face_layout, region)
    try:
        yield Pages(layout, own, (KVView(face_layout, region, staging),))
    finally:
        release_region(region)


def _allocate(layout: KVLayout, num_pages: int) -> PagedRegion:
    shapes = [(num_pages, layout.page_bytes(layer)) for layer in range(layout.num_layers)]
    return allocate_shared_region(shapes)


@dataclass
class Node:
    """One worker without an engine."""

    name: str
    agent: HandoffAgent
    pages: Pages
    epoch: Epoch
    woken: threading.Event

    @property
    def layout(self) -> KVLayout:
        return self.pages.layout

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(WorkerId(self.name), self.epoch, self.agent.address)

    def wait_for(self, count: int = 1, timeout_s: float = 30.0) -> list[HandoffEvent]:
        events: list[HandoffEvent] = []
        deadline = CLOCK.now() + timeout_s
        while len(events) < count:
            left = deadline - CLOCK.now()
            assert left > 0, f"{self.name} got only {events} in {timeout_s} s"
            self.woken.wait(left)
            self.woken.clear()
            events += self.agent.poll()
        return events

    def stays_silent(self, for_s: float = 0.3) -> bool:
        """Whether no event comes for a while."""
        return not self.woken.wait(for_s)

    def canonical(self, table: BlockTable, layer: int, start: int, stop: int) -> bytes:
        sequence = PagedSequence(self.layout, table)
        own = self.pages.own[layer]
        return read_canonical(sequence, layer, own, start=start, stop=stop).tobytes()

    def scribble(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for pages in self.pages.own:
            pages[:] = rng.integers(0, 256, pages.shape, dtype=np.uint8)


@contextmanager
def node(
    name: str,
    *,
    kinds: tuple[str, ...],
    key: Credentials,
    block_size: int = 16,
    pages: Pages | None = None,
    fingerprint: str = "model-a",
    traits: dict[str, str] | None = None,
    op: TransferOp = "WRITE",
    clock: Clock = CLOCK,
    timeout_s: float = 60.0,
    lease_s: float = 10.0,
    layer_batch_bytes: int = 0,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    links: LinkOptions = LISTED,
    observer: LinkObserver | None = None,
    verification: VerificationPolicy | None = None,
    is_stepped: bool = False,
    host: str = "127.0.0.1",
    write_lease: WriteLease | None = None,
    build: Callable[[str, dict[str, object]], TransportFactory] = TRANSPORTS.build,
) -> Iterator[Node]:
    """A worker whose agent has a thread, unless the test steps it itself."""
    if pages is None:
        with (
            plain_pages(make_layout(block_size)) as plain,
            node(
                name, kinds=kinds, key=key, pages=plain, fingerprint=fingerprint, traits=traits,
                op=op, clock=clock, timeout_s=timeout_s, lease_s=lease_s,
                layer_batch_bytes=layer_batch_bytes, wrap=wrap,
                links=links, observer=observer, verification=verification, is_stepped=is_stepped,
                host=host, write_lease=write_lease, build=build,
            ) as running,
        ):  # fmt: skip
            yield running
        return
    epoch = new_epoch()
    context = TransportContext(credentials=key, epoch=epoch, bind_host=host, clock=clock)
    transports = tuple(wrap(build(kind, {})(context)) for kind in kinds)
    agent = HandoffAgent(
        AgentOptions(
            worker=WorkerId(name),
            epoch=epoch,
            fingerprint=fingerprint,
            views=pages.views,
            transports=transports,
            credentials=key,
            clock=clock,
            host=host,
            timeout_s=timeout_s,
            lease_s=lease_s,
            layer_batch_bytes=layer_batch_bytes,
            preferred_op=op,
            traits=traits or {},
            links=links,
            verification=verification or VerificationPolicy(),
            write_lease=write_lease,
        )
    )
    if observer is not None:
        agent.observe_links(observer)
    woken = threading.Event()
    running = Node(name, agent, pages, epoch, woken)
    if is_stepped:
        agent.open(woken.set)
        try:
            yield running
        finally:
            agent.loop.close()
        return
    agent.start(woken.set)
    try:
        yield running
    finally:
        agent.stop()
        assert not agent.is_alive


def blocks_for(num_tokens: int, block_size: int, seed: int, first: int = 0) -> BlockTable:
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_tokens // block_size) - first
    return BlockTable(first, rng.permutation(NUM_BLOCKS)[:num_blocks].astype(np.int64))


@dataclass
class Handoff:
    """One handoff between two nodes: `offer` and `compute` play the prefill worker's engine."""

    prefill: Node
    decode: Node
    sending: SendOrder
    receiving: ReceiveOrder

    def start_receive(self) -> None:
        self.decode.agent.start_receive(self.receiving)

    def start_send(self) -> None:
        self.prefill.agent.start_send(self.sending)

    def wait_until_granted(self) -> None:
        """So that what is computed from now on is sent step by step, not all at once."""
        deadline = CLOCK.now() + 30.0
        while Stamp.GRANTED not in self.receiving.trace.stamps:
            assert CLOCK.now() < deadline, "no grant in 30 s"
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)  # for its way to the other side

    def wait_until_written(self) -> None:
        """Until some of what was computed was sent."""
        deadline = CLOCK.now() + 30.0
        while not self.sending.trace.num_bytes:
            assert CLOCK.now() < deadline, "nothing was written in 30 s"
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)  # the other layers

    def compute(self, *stops: int) -> None:
        for stop in stops:
            for layer in range(NUM_LAYERS):
                self.prefill.agent.layer_ready([(self.sending.ticket.id, stop)], layer)

    def prefill_done(self, first_token: SampledToken | None = FIRST) -> None:
        self.prefill.agent.prefill_done(self.sending.ticket.id, first_token)

    def check_landed(self, first_token: SampledToken | None = FIRST) -> None:
        ticket = self.sending.ticket.id
        landed = self.decode.wait_for()
        assert landed == [KVLanded(ticket, first_token)], landed
        assert self.prefill.wait_for() == [KVSent(ticket)]
        self.check_bytes()

    def check_bytes(self) -> None:
        start, stop = self.receiving.start, self.receiving.num_tokens
        for layer in range(self.prefill.layout.num_layers):
            assert self.decode.canonical(
                self.receiving.blocks, layer, start, stop
            ) == self.prefill.canonical(self.sending.blocks, layer, start, stop)


def make_handoff(
    prefill: Node,
    decode: Node,
    *,
    num_tokens: int = 101,
    start_blocks: int = 0,
    num_ready: int = 0,
    num_cached: int = 0,
    seed: int = 1,
    mode: HandoffMode = "push",
    gateway: Credentials | None = None,
) -> Handoff:
    """Blocks in random order on both sides; the decode worker has its first `start_blocks`.

    The prefill worker has `num_ready` tokens in place, and need not compute `num_cached`.
    `gateway` signs the ticket where workers may not.
    """
    ticket = make_ticket(prefill.ref, decode.ref, mode)
    if gateway is not None:
        ticket = unseal(seal(ticket, gateway), gateway)
    src_block, dst_block = prefill.layout.block_size, decode.layout.block_size
    target = blocks_for(num_tokens, dst_block, seed + 1, first=start_blocks)
    return Handoff(
        prefill,
        decode,
        send_order(
            ticket,
            num_tokens=num_tokens,
            num_ready_tokens=num_ready,
            num_cached_tokens=num_cached,
            blocks=blocks_for(num_tokens, src_block, seed),
        ),
        receive_order(ticket, start=start_blocks * dst_block, num_tokens=num_tokens, blocks=target),
    )
