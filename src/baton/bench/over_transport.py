"""A registered transport, measured as a handoff agent uses it: submit, then poll."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.bench.contender import Traits
from baton.bench.lending import announce, borrow, digest_borrowed, read_announcement
from baton.bench.pool import allocate_pool
from baton.errors import TransferError
from baton.ids import Epoch, TicketId, new_epoch, new_ticket_id
from baton.kv.copies import PageCopies
from baton.transfer.adaptive_wait import MAX_SPIN_S, AdaptiveWaiter
from baton.transfer.devices.options import choose_allocation
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransportContext,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
)
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.bench.contender import CallWaiting, Surroundings
    from baton.bench.lending import Borrowed
    from baton.bench.workload import Direction, Move
    from baton.transfer.interface import Capabilities, TransferEvent

TRANSFER_TIMEOUT_S: Final = 30.0
BLIND_POLL_S: Final = 0.0005
POLL_S: Final = 0.2
NUM_IDLE_POLLS: Final = 256
"""As many as an agent makes in some seconds: transports get ready for a peer in idle polls."""
NOTIFICATION: Final = b"baton bench"

NO_COPIES: Final = PageCopies(0, ())


class Introduction(msgspec.Struct, frozen=True):
    """A side's region, the life that will write, and the grant that the owner opens for it."""

    descriptor: RegionDescriptor
    epoch: Epoch
    grant: TicketId


class OverTransport:
    """See `Contender`. Every page of the pool is in one grant, open all the time."""

    def __init__(self, kind: str, options: Mapping[str, object], around: Surroundings) -> None:
        self._around, self._epoch, self._grant = around, new_epoch(), new_ticket_id()
        context = TransportContext(around.key, self._epoch, around.host, around.clock)
        self._transport = TRANSPORTS.build(kind, options)(context)
        capabilities = self._transport.capabilities
        self.traits = Traits(
            self._transport.kind,
            _directions(capabilities),
            "memcpy" if capabilities.same_host_only else "tuned socket",
        )
        self.region = self.target = allocate_pool(
            capabilities.memory,
            around.num_pages,
            around.page_bytes,
            allocate_shared=choose_allocation({kind: options}),
        )
        self._remote = RemoteId(-1)
        self._peer_grant = self._grant
        self._waiting = AdaptiveWaiter(around.clock, MAX_SPIN_S)
        self._borrowed: list[Borrowed] = []

    def introduce(self) -> bytes:
        """See `Contender`."""
        descriptor = self._transport.expose(self.region)
        return msgspec.msgpack.encode(Introduction(descriptor, self._epoch, self._grant))

    def meet(self, introduction: bytes) -> None:
        """See `Contender`. The grant's name is the owner's, its writer the driver."""
        told = msgspec.msgpack.decode(introduction, type=Introduction)
        lends, pages = self._transport.capabilities.views, np.arange(self._around.num_pages)
        self._peer_grant = told.grant
        if self._around.role == "owner" or lends:
            self._transport.open_grant(
                WriteGrant(self._grant, self.region.handle, told.epoch, pages)
            )
        if self._around.role == "driver" or lends:
            self._remote = self._transport.attach(told.descriptor)
        if self._around.role == "owner":
            return
        self._wait_for(RemoteAttached, *([Arrived] if lends else []))
        self._idle()

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Contender`. The index arrays are ready: the handoff keeps them for all layers."""
        if direction == "lend":
            return lambda: self._lend(move)
        transport, copies = self._transport, move.copies
        if direction == "push":
            write = PageWrite(
                self._remote, self._peer_grant, self.region.handle, copies, NOTIFICATION
            )

            def push() -> None:
                transport.submit(write)
                self._wait_for(WriteCompleted)

            return push
        read = PageRead(self._remote, self.region.handle, copies)

        def pull() -> None:
            transport.read(read)
            self._wait_for(ReadCompleted)

        return pull

    def rest(self) -> None:
        """See `Contender`: the owner sees orders itself."""

    def serve(self, call: CallWaiting) -> None:
        """See `Contender`."""
        while not call():
            for event in self._transport.poll():
                self._heed(event)
            ready_fd = self._transport.readiness_fd
            watched = [call.fd] if ready_fd is None else [call.fd, ready_fd]
            self._sleep(watched, BLIND_POLL_S if ready_fd is None else POLL_S)

    def digest_seen(self) -> str:
        """See `Borrower`."""
        return digest_borrowed(self._borrowed)

    def close(self) -> None:
        """See `Contender`."""
        self._borrowed.clear()
        self._transport.close()
        release_region(self.region)

    def _lend(self, move: Move) -> None:
        """Driver: the owner has these pages in view, and has said so."""
        *notifications, last = announce(move)
        for notification in notifications:
            self._notify(notification)
            self._wait_for(WriteCompleted)
        self._notify(last)
        self._wait_for(WriteCompleted, Arrived)

    def _heed(self, event: TransferEvent) -> None:
        """Owner: the driver's region can be looked at, or there is something to look at."""
        if isinstance(event, RemoteAttached):
            self._transport.view(self._remote, 0)
            self._idle()
            self._notify(NOTIFICATION)
        elif isinstance(event, Arrived) and event.notification != NOTIFICATION:
            said = read_announcement(event.notification)
            if said.part == 0:
                self._borrowed.clear()
            self._borrowed.append(borrow(said, self._transport.view(self._remote, said.array)))
            if said.is_last:
                self._notify(NOTIFICATION)

    def _idle(self) -> None:
        """Nothing is under way: let the transport get ready."""
        for _ in range(NUM_IDLE_POLLS):
            self._transport.poll()

    def _notify(self, notification: bytes) -> None:
        """Say something to the other side, and copy nothing."""
        self._transport.submit(
            PageWrite(self._remote, self._peer_grant, self.region.handle, NO_COPIES, notification)
        )

    def _wait_for(self, *kinds: type[TransferEvent]) -> None:
        """Until each of these has happened."""
        transport, clock = self._transport, self._around.clock
        deadline, missing = clock.now() + TRANSFER_TIMEOUT_S, set(kinds)
        while True:
            for event in transport.poll():
                missing.discard(type(event))
                if isinstance(event, RemoteLost | WriteFailed | ReadFailed):
                    raise event.error
            if not missing:
                return
            if clock.now() >= deadline:
                names = ", ".join(sorted(kind.__name__ for kind in missing))
                raise TransferError(f"no {names} within {TRANSFER_TIMEOUT_S:g} s")
            fd = transport.readiness_fd
            self._sleep([] if fd is None else [fd], BLIND_POLL_S if fd is None else POLL_S)

    def _sleep(self, fds: list[int], timeout_s: float) -> None:
        """Until one of these is readable; as an agent's thread does."""
        self._waiting.wait(lambda limit_s: select.select(fds, [], [], limit_s)[0], timeout_s)


def _directions(capabilities: Capabilities) -> tuple[Direction, ...]:
    ways: list[Direction] = ["push"]
    ways += ["pull"] if capabilities.reads else []
    ways += ["lend"] if capabilities.views else []
    return tuple(ways)
