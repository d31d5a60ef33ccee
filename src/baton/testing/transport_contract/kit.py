"""How the suites build transports, and what they check after each write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from baton.auth.credentials import Credentials
from baton.clock import Clock, MachineClock
from baton.ids import TicketId, new_epoch
from baton.testing.transport_pair import TIMEOUT_S, Side, TransportPair, spans_of_pages
from baton.transfer.devices.extents import choose_allocation
from baton.transfer.interface import TRANSPORTS, Arrived, TransportContext, WriteCompleted
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.copies import CopyGroup
    from baton.transfer.interface import PagedRegion, RegionDescriptor, RemoteId, Transport

PAGE_BYTES = 8192
SMALL_PAGE_BYTES = 1536
NUM_PAGES = 64
SHAPES = ((NUM_PAGES, PAGE_BYTES), (NUM_PAGES, SMALL_PAGE_BYTES))
LOOPBACK = "127.0.0.1"


class TransportKit:
    """What a subclass states about its transport.

    `kind` names an installed one; override `make_transport` to wrap it. `peer_writes` is set where
    the writer itself stores into the receiver's memory, so that a grant's quiescence depends on
    it. `peer_module` is run where a peer lives in a process of its own. `side_type` looks at memory
    that this process can not view. `host` is the address that this process's transports bind.
    """

    kind: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}
    peer_writes: ClassVar[bool]
    peer_module: ClassVar[str] = "baton.testing.transport_peer"
    side_type: ClassVar[type[Side]] = Side
    credentials: ClassVar[Credentials] = Credentials.generate()
    host = LOOPBACK

    def make_transport(self, context: TransportContext) -> Transport:
        """A fresh transport."""
        return TRANSPORTS.build(self.kind, self.options)(context)

    def allocate(self, shapes: Sequence[tuple[int, int]]) -> PagedRegion:
        """Memory that the transport can expose."""
        return choose_allocation({self.kind: self.options})(shapes)

    def connect_unauthenticated(self, descriptor: RegionDescriptor) -> socket.socket:
        """A blocking socket to the transport's listener, with a timeout and nothing sent yet."""
        raise NotImplementedError

    def make_side(
        self,
        shapes: Sequence[tuple[int, int]] = SHAPES,
        *,
        credentials: Credentials | None = None,
        clock: Clock | None = None,
    ) -> Side:
        """A fresh transport with a zeroed region."""
        epoch = new_epoch()
        context = TransportContext(
            credentials or self.credentials, epoch, self.host, clock or MachineClock()
        )
        return self.side_type.start(self.make_transport(context), epoch, self.allocate(shapes))

    @pytest.fixture
    def pair(self) -> Generator[TransportPair]:
        """Two sides with regions alike, the writer's full of random bytes."""
        pair = TransportPair.of(self.make_side(), self.make_side())
        pair.writer.fill(seed=1)
        yield pair
        pair.close()

    @pytest.fixture(autouse=True)
    def check_descriptors(self) -> Generator[None]:
        """Every test closes what it opened, and so must the transport."""
        before = list_open_fds()
        yield
        # What another test left may be collected, and closed, in the middle of this one; and a
        # library's thread (UCX has one) opens a file for a moment. What is left stays.
        deadline = time.monotonic() + TIMEOUT_S  # noqa: TID251 -- threads that are not ours
        while left := list_open_fds() - before:
            assert time.monotonic() < deadline, left  # noqa: TID251
            time.sleep(0.01)


def check_write(
    pair: TransportPair,
    remote: RemoteId,
    grant: TicketId,
    groups: Sequence[CopyGroup],
    *,
    array: int = 0,
    num_arrays: int = 1,
) -> None:
    """Submit a write, wait for both ends of it, and compare *all* bytes of the reader's region."""
    expected = bytearray(pair.reader.snapshot())
    for each in range(array, array + num_arrays):
        target = view_pages(memoryview(expected), pair.reader.region.arrays[each])
        apply_slowly(groups, pair.writer.pages(each), target)
    num_before = len(pair.seen(Arrived))
    notification = f"write {num_before}".encode()
    write = pair.write(
        remote, grant, groups, array=array, num_arrays=num_arrays, notification=notification
    )
    transfer = pair.writer.transport.submit(write)
    done = WriteCompleted(transfer, write.copies.num_bytes)
    pair.pump(lambda: done in pair.writer_events and len(pair.seen(Arrived)) > num_before)
    assert pair.reader_events[-1] == Arrived(grant, notification)
    assert pair.reader.snapshot() == expected


def apply_slowly(
    groups: Sequence[CopyGroup], source: NDArray[np.uint8], target: NDArray[np.uint8]
) -> None:
    """The copies as they are defined, one span at a time."""
    for group in groups:
        for src_page, dst_page in zip(group.src_pages, group.dst_pages, strict=True):
            for src_byte, dst_byte, num_bytes in group.spans:
                piece = source[src_page, src_byte : src_byte + num_bytes]
                target[dst_page, dst_byte : dst_byte + num_bytes] = piece


def random_groups(
    rng: np.random.Generator, src_page_bytes: int, dst_page_bytes: int
) -> list[CopyGroup]:
    """A few groups of random spans between random pages; no destination page twice."""
    groups, dst_pages = [], rng.permutation(NUM_PAGES)
    for _ in range(3):
        num_pages = int(rng.integers(0, 12))
        mine, dst_pages = dst_pages[:num_pages], dst_pages[num_pages:]
        width = min(src_page_bytes, dst_page_bytes) // 4
        spans = [
            (
                int(rng.integers(0, src_page_bytes - width + 1)),
                quarter * width,
                int(rng.integers(1, width + 1)),
            )
            for quarter in range(int(rng.integers(1, 5)))
        ]
        groups.append(spans_of_pages(rng.integers(0, NUM_PAGES, num_pages), mine, spans))
    return groups


def list_open_fds() -> set[str]:
    """What this process' descriptors point to, each by number and name."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found
