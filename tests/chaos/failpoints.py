"""A transport of real workers that does wrong when a test says so, through a file.

`install` makes it an entry point, as a stranger's plug-in would be. The worker's configuration:
`transfer.transports = ["failpoint"]`, `[transfer.options.failpoint] inner = "tcp", folder = …`.
Peers see `inner`. The test writes `armed.json`; the transport says in `struck.json` what really
went wrong.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton.handoff.messages import decode_notification
from baton.registry import Plugin
from baton.testing.corrupted_copies import ByteRange
from baton.testing.faulty_transport import Fault, FaultPlan, FaultyTransport
from baton.transfer.interface import TRANSPORTS
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from baton.ids import TicketId
    from baton.transfer.interface import (
        Arrived,
        TransferEvent,
        Transport,
        TransportContext,
        WriteGrant,
    )


BLOCK_SIZE = 16
"""Of the workers here; their prompts are handed over from the first token on."""


class FailpointOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wrapped, and where the files lie."""

    inner: str
    folder: str


class Armed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fault` strikes the next `count` times. `holds`: what is held back stays so."""

    number: int
    fault: Fault | None = None
    count: int = 0
    holds: bool = False


class Failpoint:
    """The test's end of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0

    def arm(self, fault: Fault | None, count: int = 1, *, holds: bool = False) -> None:
        self._number += 1
        draft = self.folder / "draft.json"
        draft.write_bytes(msgspec.json.encode(Armed(self._number, fault, count, holds)))
        draft.replace(self.folder / "armed.json")

    def disarm(self) -> None:
        self.arm(None, 0)

    def count(self, fault: Fault) -> int:
        """How often it struck in all."""
        try:
            injected = msgspec.json.decode((self.folder / "struck.json").read_bytes())
        except FileNotFoundError:
            return 0
        return int(injected.get(fault, 0))


class FailpointTransport(FaultyTransport):
    """The worker's end of it."""

    def __init__(self, inner: Transport, folder: Path) -> None:
        super().__init__(inner, FaultPlan(seed=1, rates={}))
        self.readiness_fd = inner.readiness_fd
        self._folder = folder
        self._armed = Armed(0)
        self._told: Counter[Fault] = Counter()
        self._grants: dict[TicketId, WriteGrant] = {}

    def poll(self) -> list[TransferEvent]:
        self._look()
        events = super().poll()
        self._tell()
        return events

    def open_grant(self, grant: WriteGrant) -> None:
        self._grants[grant.id] = grant
        super().open_grant(grant)

    def close_grant(self, grant: TicketId) -> None:
        """What is held back comes after its grant is closed: late, as from a bad transport."""
        self._grants.pop(grant, None)
        self._inner.close_grant(grant)

    def finish_grant(self, grant: TicketId) -> bool:
        self._grants.pop(grant, None)
        return self._inner.finish_grant(grant)

    def _take_notification(self, event: Arrived) -> list[TransferEvent]:
        fault = self._draw((Fault.FLIP_BIT, Fault.ZERO_PAGE))
        if fault is not None:
            self._spoil_arrived(event, fault)
        return super()._take_notification(event)

    def _spoil_arrived(self, event: Arrived, fault: Fault) -> None:
        """Damage the first page of what arrived, before its owner hears of it."""
        grant, notification = self._grants[event.grant], decode_notification(event.notification)
        array = self._regions[grant.region].arrays[notification.layer]
        pages = view_pages(self._regions[grant.region].memory, array)
        page = int(grant.pages[notification.start // BLOCK_SIZE])
        self._corrupt(pages, ByteRange(page, 0, array.page_bytes), fault)

    def _draw(self, faults: tuple[Fault, ...]) -> Fault | None:
        self._look()
        return super()._draw(faults)

    def _release_overdue(self) -> list[TransferEvent]:
        return [] if self._armed.holds else super()._release_overdue()

    def _look(self) -> None:
        try:
            raw = (self._folder / "armed.json").read_bytes()
        except FileNotFoundError:
            return
        armed = msgspec.json.decode(raw, type=Armed)
        if armed.number != self._armed.number:
            self._armed = armed
            # Where everything is held back, nothing can overtake it.
            rate = 0.5 if armed.fault is Fault.REORDER_NOTIFICATION else 1.0
            rates = {armed.fault: rate} if armed.fault else {}
            self._plan = FaultPlan(1, rates, self.injected.total() + armed.count, delay_polls=20)

    def _tell(self) -> None:
        if self.injected != self._told:
            self._told = Counter(self.injected)
            draft = self._folder / "telling.json"
            draft.write_bytes(msgspec.json.encode(dict(self.injected)))
            draft.replace(self._folder / "struck.json")


def _build(options: FailpointOptions):
    def factory(context: TransportContext) -> Transport:
        inner = TRANSPORTS.build(options.inner, {})(context)
        return FailpointTransport(inner, Path(options.folder))

    return factory


PLUGIN = Plugin(FailpointOptions, _build)


def install(directory: Path) -> None:
    """Write the distribution's metadata; the directory and the clone belong on PYTHONPATH."""
    metadata = directory / "failpoints-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: failpoints\nVersion: 1.0\n", "utf-8")
    entry = f"[baton.transports]\nfailpoint = {__name__}:PLUGIN\n"
    (metadata / "entry_points.txt").write_text(entry, "utf-8")


def settings(folder: Path, inner: str) -> dict[str, object]:
    """What a worker's configuration says."""
    return {
        "transfer.transports": ["failpoint"],
        "transfer.choice": "listed",
        "transfer.options.failpoint.inner": inner,
        "transfer.options.failpoint.folder": str(folder),
    }
