"""Well-formed frames with wrong values, from an authenticated peer, to a real transport.

The liar is a transport of the same kind, over whose connection other frames are sent too: as the
side that writes, or as the owner of the pages. No exception may escape the victim's `poll`, no byte
may change outside of what it granted, nothing may be reported of grants that it has not opened,
and another peer is served afterwards.
"""

from __future__ import annotations

import atexit
import tempfile
from contextlib import suppress
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from baton.errors import BatonError
from baton.ids import new_ticket_id
from baton.net.framing import encode
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer import grant_messages
from baton.transfer.interface import Arrived, GrantQuiescent, PageArray, WriteGrant
from baton.transfer.messages import NotAttached
from baton.transfer.transports.file import wire as file_wire
from baton.transfer.transports.shared import wire as shared
from baton.transfer.transports.tcp import wire as tcp
from tests.fuzz.mutation import BOUNDARIES

if TYPE_CHECKING:
    from baton.net.connection import Connection

GRANTS: Final = (
    grant_messages.QueryGrant, grant_messages.GrantClosed, grant_messages.MemoryReleased,
    grant_messages.GrantOpened, grant_messages.CloseGrant, grant_messages.GrantNotOpen,
)  # fmt: skip
FRAMES: Final[dict[str, tuple[type, ...]]] = {
    "tcp": (
        tcp.Data, tcp.Data, tcp.Data, tcp.Data, tcp.Fetch, tcp.Fetch, tcp.Attach, tcp.Attached,
        tcp.WriteLanded, tcp.WriteRefused, tcp.FetchServed, NotAttached,
    ),
    "shared": (shared.WriteNotification, shared.Attach, shared.Attached, NotAttached, *GRANTS),
    "file": (
        file_wire.PartFile, file_wire.PartFile, file_wire.WriteAbandoned, file_wire.Attach,
        file_wire.Attached, file_wire.PartLanded, file_wire.PartRefused, NotAttached,
    ),
}  # fmt: skip
GRANTED: Final = range(8, 16)
"""Pages that the liar may write."""
NUM_FRAMES: Final = 12
MAX_CONNECTIONS: Final = 4
NUM_POLLS: Final = 3


@cache
def kit_of(kind: str) -> TransportKit:
    options: dict[str, str] = {}
    if kind == "file":
        folder = tempfile.TemporaryDirectory(prefix="baton-fuzz-")
        atexit.register(folder.cleanup)
        options["directory"] = folder.name
    return type("Kit", (TransportKit,), {"kind": kind, "options": options})()


class FrameLies:
    """Draws frames: often what would be right, else what could be there."""

    def __init__(self, rng: Random, pair: TransportPair, grants: list[bytes]) -> None:
        self._rng, self._pair, self._grants = rng, pair, grants
        self._sequence = 0

    def begin(self) -> None:
        """On another connection."""
        self._sequence = 0

    def frame(self, kind: type) -> Any:
        share = self._rng.choice((0.0, 0.15, 0.6))
        names = cast("Any", kind).__struct_fields__
        return kind(**{
            name: self._field(name) if self._rng.random() < share else self._right(name)
            for name in names
        })

    def _right(self, name: str) -> Any:
        match name:
            case "grant":
                return self._grants[0]
            case "sequence" | "number":
                self._sequence += 1
                return self._sequence - 1
            case "array" | "layer":
                return 0
            case "num_layers" | "stripes":
                return 1
            case "dst_pages" | "src_pages" | "pages":
                return np.array([self._rng.choice(GRANTED)], "<u4").tobytes()
            case "spans":
                return np.array([0, PAGE_BYTES], "<u4").tobytes()
            case "notification":
                return b"n"
            case "epoch":
                return self._pair.writer.epoch
            case "region":
                return self._pair.reader.region.handle
            case _:
                return self._field(name)

    def _field(self, name: str) -> Any:
        rng, reader = self._rng, self._pair.reader
        match name:
            case "grant":
                return rng.choice((*self._grants, self._grants[0], rng.randbytes(16)))
            case "region" | "holder" | "link" | "proof" | "extent":
                return rng.choice((reader.region.handle, bytes(16), rng.randbytes(16)))
            case "epoch":
                return rng.choice((self._pair.writer.epoch, reader.epoch, "0" * 32))
            case "sequence" | "number":
                return rng.choice((self._sequence - 1, self._sequence + 1, 0, 1 << 61)) % (1 << 62)
            case "array" | "layer":
                return rng.choice((0, 0, 0, 1, 2, 4095))
            case "num_layers" | "stripes":
                return rng.choice((1, 1, 1, 2, 16))
            case "dst_pages" | "src_pages" | "pages":
                return self._numbers(GRANTED, NUM_PAGES, rng.choice((1, 1, 1, 2, 8, 300)), 1)
            case "spans":
                if rng.random() < 0.6:
                    return np.array([0, PAGE_BYTES], "<u4").tobytes()
                return self._numbers((0, 64, 1024), PAGE_BYTES, rng.choice((1, 2, 50)), 2)
            case "notification":
                return rng.choice((None, b"", b"n", rng.randbytes(200)))
            case "arrays":
                array = PageArray(*(rng.choice(BOUNDARIES[-40:]) % (1 << 62) for _ in range(3)))
                return rng.choice((reader.descriptor.arrays, (), (array,), (array,) * 50))
            case "reason":
                return "because"
            case "is_only":
                return rng.random() < 0.5
            case "spool":
                return f"baton-{rng.randbytes(16).hex()}-{rng.randbytes(8).hex()}"
            case _:
                raise AssertionError(f"no lies are known for {name}")

    def _numbers(self, right: Any, most: int, num: int, width: int) -> bytes:
        rng = self._rng
        if rng.random() < 0.05:
            return rng.randbytes(rng.choice((0, 3, 5, 8)))
        drawn = [
            rng.choice((*right, *right, most - 1, most, (1 << 32) - 1))
            if rng.random() < 0.3
            else rng.choice(right)
            for _ in range(num * width)
        ]
        return np.array(drawn, "<u4").tobytes()

    def payload(self, frame: Any) -> bytes:
        """What follows a `Data`: as much as it announces, more often than not."""
        rng = self._rng
        if isinstance(frame, tcp.Data):
            spans = np.frombuffer(frame.spans[: len(frame.spans) // 8 * 8], "<u4").reshape(-1, 2)
            num_bytes = len(frame.dst_pages) // 4 * int(spans[:, 1].sum())
            num_bytes = min(num_bytes, 4 * PAGE_BYTES)
            return rng.randbytes(num_bytes if rng.random() < 0.9 else rng.randrange(num_bytes + 1))
        if isinstance(frame, tcp.FetchServed):
            return rng.randbytes(rng.choice((0, PAGE_BYTES)))
        return b""


def connections_of(transport: Any) -> list[Connection]:
    """A transport's connections that are open: those that it dialed, and those that it accepted."""
    found: list[Connection] = []
    for remote in transport._remotes.values():
        found += getattr(remote, "_connections", None) or [getattr(remote, "_connection", None)]
    found += list(getattr(transport, "_inbound", {}))
    found += [writer._connection for writer in getattr(transport, "_writers", {}).values()]
    return [each for each in found if each is not None and each.is_open]


def lie_as_writer(rng: Random, kind: str) -> str:
    """The victim owns the pages."""
    kit = kit_of(kind)
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    victim = pair.reader
    try:
        victim.fill(seed=1)
        grants = [new_ticket_id() for _ in range(3)]  # open, for another epoch, closed
        for grant, epoch in zip(
            grants, (pair.writer.epoch, "1" * 32, pair.writer.epoch), strict=True
        ):
            pages = np.array(GRANTED)
            victim.transport.open_grant(
                WriteGrant(grant, victim.region.handle, cast("Any", epoch), pages)
            )
        victim.transport.close_grant(grants[2])
        before = [victim.pages(array).copy() for array in range(2)]
        lies = FrameLies(rng, pair, list(grants))
        for _ in range(MAX_CONNECTIONS):
            with suppress(AssertionError):  # it may be hung up on
                pair.attach()
            send_lies(rng, kind, pair.writer.transport, lies, pair)
        check_pages(victim, before)
        for event in pair.reader_events:
            if isinstance(event, Arrived):
                assert event.grant == grants[0], f"{event} for a grant that is not the liar's"
        outcome = " ".join(sorted({type(event).__name__ for event in pair.reader_events}))
        check_served(kit, victim)
        return f"{kind}: {outcome}"
    finally:
        pair.close()


def lie_as_owner(rng: Random, kind: str) -> str:
    """The victim writes into the liar's pages, or reads them."""
    kit = kit_of(kind)
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    victim = pair.writer
    try:
        victim.fill(seed=2)
        before = [victim.pages(array).copy() for array in range(2)]
        remote, grant = pair.attach(), pair.open_grant(GRANTED)
        lies = FrameLies(rng, pair, [grant])
        for _ in range(MAX_CONNECTIONS):
            for _ in range(rng.randrange(3)):
                groups = [whole_pages([1], [rng.choice(GRANTED)], PAGE_BYTES)]
                with suppress(BatonError):
                    victim.transport.submit(pair.write(remote, grant, groups, notification=b"n"))
            send_lies(rng, kind, pair.reader.transport, lies, pair)
        for array, copy in enumerate(before):
            assert (victim.pages(array) == copy).all(), "the pages of one that only writes changed"
        outcome = " ".join(sorted({type(event).__name__ for event in pair.writer_events}))
        victim.transport.detach(remote)
        check_served(kit, victim)
        return f"{kind}, owner: {outcome}"
    finally:
        pair.close()


def send_lies(
    rng: Random, kind: str, transport: object, lies: FrameLies, pair: TransportPair
) -> None:
    lies.begin()
    for _ in range(rng.randrange(1, NUM_FRAMES)):
        for connection in connections_of(transport)[:1]:
            frame = lies.frame(rng.choice(FRAMES[kind]))
            connection.send_body(encode(frame))
            payload = lies.payload(frame)
            if payload:
                connection.send_batches(iter(([memoryview(payload)],)))
            connection.flush()
        for _ in range(NUM_POLLS):
            pair.poll()


def check_pages(victim: Any, before: list[Any]) -> None:
    for array, copy in enumerate(before):
        changed = set(np.flatnonzero((victim.pages(array) != copy).any(axis=1)).tolist())
        assert changed <= set(GRANTED), f"pages {sorted(changed - set(GRANTED))} changed"


def check_served(kit: TransportKit, victim: Any) -> None:
    """Another peer, that keeps the rules, writes into the victim's pages."""
    pair = TransportPair.of(kit.make_side(), victim)
    try:
        pair.writer.fill(seed=3)
        remote, grant = pair.attach(), pair.open_grant([30, 31])
        check_write(pair, remote, grant, [whole_pages([5, 6], [30, 31], PAGE_BYTES)])
        pair.reader.transport.close_grant(grant)
        pair.pump(lambda: GrantQuiescent(grant) in pair.reader_events)
    finally:
        pair.writer.close()


def run_transfer(data: bytes) -> str:
    """An episode that follows from these bytes."""
    rng = Random(data)
    kind = rng.choice(tuple(FRAMES))
    return (lie_as_writer if rng.random() < 0.6 else lie_as_owner)(rng, kind)
