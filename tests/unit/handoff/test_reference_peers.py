"""Mode reference at the borders of processes and links: what is exported is released in the end."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from baton.auth.ticket import WorkerRef
from baton.clock import Instant
from baton.handoff.interface import ExportReleased
from baton.handoff.messages import Release
from baton.handoff.prefill_sender import PrefillSender
from baton.handoff.reference.exports import SharedBlockExporter
from baton.handoff.reference.imports import ImportTable, SharedBlockImporter, _Exporter
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.kv.layout import KVLayout
from baton.testing.clocks import ManualClock
from baton.transfer.interface import PageArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.handoff.grants import Granted
    from baton.handoff.kv_views import AgentContext
    from baton.handoff.peers import Peer
    from baton.ids import TicketId

IMPORTER, EXPORTER = Epoch("i" * 32), Epoch("e" * 32)
LAYOUT = KVLayout.gqa(2, 2, 8, block_size=16, dtype="float32")


class OneReader:
    """A transport over which one process has mapped the pages."""

    capabilities = SimpleNamespace(scopes_reads=False)

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def open_reader(self, reader: Epoch) -> int | None:
        return os.pidfd_open(self._pid)


def peer_of(epoch: Epoch, dialed: WorkerRef | None = None) -> Any:
    return SimpleNamespace(
        hello=SimpleNamespace(epoch=epoch),
        dialed=dialed,
        negotiated=SimpleNamespace(theirs=SimpleNamespace(layout=LAYOUT)),
    )


@contextmanager
def exporter_to(
    process: subprocess.Popen[bytes],
) -> Iterator[tuple[SharedBlockExporter, list[Any]]]:
    events: list[Any] = []
    region = SimpleNamespace(arrays=(PageArray(0, 4096, 64),))
    view = SimpleNamespace(
        view=SimpleNamespace(layout=LAYOUT, region=region, peer_mappings=object()),
        is_gathered=False,
    )
    context = SimpleNamespace(
        views=(view,),
        view_to=lambda peer: view,
        transports=(OneReader(process.pid),),
        peers=NoPeers(),
        clock=ManualClock(),
        emit=events.append,
    )
    exporter = SharedBlockExporter(cast("AgentContext", context))
    try:
        yield exporter, events
    finally:
        exporter.close()


class NoPeers(list[Any]):
    """None is linked: what is sent goes nowhere."""

    def send(self, peer: object, message: object) -> None:
        del peer, message


def reserve(exporter: SharedBlockExporter) -> TicketId:
    ticket = new_ticket_id()
    granted = SimpleNamespace(
        peer=peer_of(IMPORTER),
        ticket=SimpleNamespace(id=ticket),
        grant=SimpleNamespace(start=0, num_tokens=100),
    )
    assert exporter.reserve(cast("Granted", granted)) is None
    return ticket


def test_what_is_exported_after_its_importer_has_ended_is_released() -> None:
    """The process was seen to end before its link was: its prompt is computed in between."""
    with subprocess.Popen(["sleep", "60"]) as process, exporter_to(process) as (exporter, events):
        ticket = reserve(exporter)
        process.kill()
        process.wait(30)
        exporter.tick()
        assert events == []
        exporter.export(ticket, Instant(1e9))
        exporter.tick()
        assert events == [ExportReleased(ticket)]
        assert exporter.table.num_blocks == 0


def test_an_importer_that_has_ended_is_watched_until_its_link_has() -> None:
    with subprocess.Popen(["sleep", "60"]) as process, exporter_to(process) as (exporter, events):
        ticket = reserve(exporter)
        process.kill()
        process.wait(30)
        exporter.tick()
        exporter.forget(ticket)  # the handoff has failed with its link
        exporter.peer_gone(cast("Peer", peer_of(IMPORTER)))
        assert exporter._processes == {}
        assert events == []


def test_a_release_that_was_lost_with_a_link_goes_over_the_one_that_replaced_it() -> None:
    """Which was up before the first one's end was dealt with."""
    sent: list[tuple[object, object]] = []
    peers = SimpleNamespace(send=lambda peer, message: sent.append((peer, message)))
    context = SimpleNamespace(peers=peers, clock=ManualClock(), views=())
    importer = SharedBlockImporter(cast("AgentContext", context), ImportTable())
    ref, ticket = WorkerRef(WorkerId("p"), EXPORTER, "127.0.0.1:1"), new_ticket_id()
    first, second = peer_of(EXPORTER, ref), peer_of(EXPORTER, ref)
    nothing = cast("Any", None)
    importer._exporters[EXPORTER] = _Exporter(ref, nothing, nothing, nothing, first)
    importer.queue_release(ticket, EXPORTER)
    importer.peer_up(second)
    importer.peer_gone(first)
    assert sent == [(first, Release((ticket,))), (second, Release((ticket,)))]
    importer.table.check_invariants()


def test_releases_of_what_was_exported_leave_no_tombstones() -> None:
    """Else those of a busy worker would take the places of tickets that are yet to come."""
    with subprocess.Popen(["sleep", "60"]) as process, exporter_to(process) as (exporter, events):
        exported, unknown = reserve(exporter), new_ticket_id()
        exporter.export(exported, Instant(1e9))
        sender = PrefillSender(exporter._context, exporter, cast("Any", None))
        sender.handle_message(cast("Peer", peer_of(IMPORTER)), Release((exported, unknown)))
        assert events == [ExportReleased(exported)]
        assert sender._tombstones.take(exported, IMPORTER) is None
        assert sender._tombstones.take(unknown, IMPORTER) is not None
        process.kill()
