"""A peer in a process of its own: `python -m baton.testing.transport_peer`.

Reads one JSON line from its standard input. A `PeerTask` makes it a writer: it attaches, and writes
into the grant's pages, all of them each time, filled with a byte that changes from write to write.
It goes on whatever happens to its writes, until its input ends; then it detaches and leaves. One
that is not attached within `ATTACH_TIMEOUT_S` reports why, and ends with exit code 1. An
`OwnerTask` makes it an owner: it exposes a region full of `OWNED_BYTE`, prints the descriptor in
one JSON line, and polls until its input ends.
"""

from __future__ import annotations

import select
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.ids import Epoch, TicketId
from baton.kv.copies import PageCopies
from baton.testing.transport_pair import whole_pages
from baton.transfer.devices.extents import AllocateRegion, choose_allocation
from baton.transfer.interface import (
    TRANSPORTS,
    PageWrite,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransportContext,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import release_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.transfer.interface import PagedRegion, Transport, TransportFactory

MAX_UNFINISHED = 4
OWNED_BYTE = 0xA5
ATTACH_TIMEOUT_S = 10.0
LOOPBACK = "127.0.0.1"


class PeerTask(msgspec.Struct, frozen=True, tag="write"):
    """What a writer is to do. `num_pages` of array 0 are written, from page 0 on."""

    kind: str
    options: dict[str, object]
    key_hex: str
    epoch: Epoch
    descriptor: RegionDescriptor
    grant: bytes
    num_pages: int
    host: str = LOOPBACK


class OwnerTask(msgspec.Struct, frozen=True, tag="own"):
    """What an owner is to expose: one array for each `(num_pages, page_bytes)`."""

    kind: str
    options: dict[str, object]
    key_hex: str
    epoch: Epoch
    shapes: tuple[tuple[int, int], ...]
    host: str = LOOPBACK


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """How a peer gets its transport and its memory: as the suite does that it belongs to."""

    build: Callable[[str, Mapping[str, object]], TransportFactory]
    choose_allocation: Callable[[str, Mapping[str, object]], AllocateRegion]
    fill: Callable[[PagedRegion, int], None]


def fill_region(region: PagedRegion, byte: int) -> None:
    """Set every byte of every page."""
    for array in region.arrays:
        view_pages(region.memory, array)[:] = byte


def _choose_allocation(kind: str, options: Mapping[str, object]) -> AllocateRegion:
    return choose_allocation({kind: options})


SHARED: Final = PeerSetup(TRANSPORTS.build, _choose_allocation, fill_region)


def main(setup: PeerSetup = SHARED) -> None:
    """Do the task on standard input."""
    task: PeerTask | OwnerTask = msgspec.json.decode(
        sys.stdin.buffer.readline(), type=PeerTask | OwnerTask
    )
    credentials = Credentials.of(ClusterKey.from_hex(task.key_hex))
    context = TransportContext(credentials, task.epoch, task.host, MachineClock())
    transport = setup.build(task.kind, task.options)(context)
    match task:
        case PeerTask():
            run_writer(transport, task, setup)
        case OwnerTask():
            run_owner(transport, task, setup)
        case unknown:
            assert_never(unknown)


def run_owner(transport: Transport, task: OwnerTask, setup: PeerSetup) -> None:
    """Expose a region, print its descriptor, and serve it until the input ends."""
    region = replace(setup.choose_allocation(task.kind, task.options)(task.shapes), is_public=True)
    setup.fill(region, OWNED_BYTE)
    sys.stdout.buffer.write(msgspec.json.encode(transport.expose(region)) + b"\n")
    sys.stdout.buffer.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        wait_for_events(transport)
    transport.close()
    release_region(region)


def run_writer(transport: Transport, task: PeerTask, setup: PeerSetup) -> None:
    """Attach, write until the input ends, leave."""
    shapes = [(array.num_pages, array.page_bytes) for array in task.descriptor.arrays]
    region = setup.choose_allocation(task.kind, task.options)(shapes)
    transport.expose(region)
    remote = transport.attach(task.descriptor)
    wait_until_attached(transport, remote)
    page_bytes = task.descriptor.arrays[0].page_bytes
    pages = range(task.num_pages)
    copies = PageCopies(0, (whole_pages(pages, pages, page_bytes),))
    write = PageWrite(remote, TicketId(task.grant), region.handle, copies, b"peer")
    write_on(transport, write, lambda byte: setup.fill(region, byte))
    transport.detach(remote)
    transport.close()
    release_region(region)


def wait_until_attached(transport: Transport, remote: RemoteId) -> None:
    """Leave the process if that does not come to be."""
    deadline = time.monotonic() + ATTACH_TIMEOUT_S  # noqa: TID251 -- real processes, real time
    while True:
        for event in wait_for_events(transport):
            match event:
                case RemoteAttached(attached) if attached == remote:
                    return
                case RemoteLost(lost, error) if lost == remote:
                    sys.exit(f"transport_peer: not attached: {error}")
                case _:
                    pass
        if time.monotonic() > deadline:  # noqa: TID251 -- see above
            sys.exit(f"transport_peer: not attached within {ATTACH_TIMEOUT_S:g} s")


def write_on(transport: Transport, write: PageWrite, fill: Callable[[int], None]) -> None:
    """Keep a few of this write under way until the input ends."""
    num_unfinished = num_written = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        while num_unfinished < MAX_UNFINISHED:
            num_written += 1
            fill(num_written % 255 + 1)
            transport.submit(write)
            num_unfinished += 1
        for event in wait_for_events(transport):
            num_unfinished -= isinstance(event, WriteCompleted | WriteFailed)


def wait_for_events(transport: Transport) -> list[object]:
    """What the transport reports once it is ready, or nothing after a while."""
    if transport.readiness_fd is not None:
        select.select([transport.readiness_fd], [], [], 0.1)
    return list(transport.poll())


if __name__ == "__main__":
    main()
