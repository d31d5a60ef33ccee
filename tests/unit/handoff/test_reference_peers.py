"""Mode reference at the borders of processes and links: what is exported is released in the end."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from baton.auth.ticket import WorkerRef
from baton.clock import Instant
from baton.handoff.interface import ExportReleased, ImportRevoked
from baton.handoff.messages import Release, ReleaseAck, Revoke
from baton.handoff.peer_transports import Reachability
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
REF = WorkerRef(WorkerId("p"), EXPORTER, "127.0.0.1:1")
LAYOUT = KVLayout.gqa(2, 2, 8, block_size=16, dtype="float32")


class OneReader:
    """A transport over which one process has mapped the pages."""

    capabilities = SimpleNamespace(scopes_reads=False)

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def open_reader(self, reader: Epoch) -> int | None:
        return os.pidfd_open(self._pid)


def peer_of(epoch: Epoch, dialed: WorkerRef | None = None, worker: str = "d") -> Any:
    return SimpleNamespace(
        hello=dialed or WorkerRef(WorkerId(worker), epoch, ""),
        name=dialed.worker if dialed else worker,
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
        peers=Peers(),
        clock=ManualClock(),
        emit=events.append,
    )
    exporter = SharedBlockExporter(cast("AgentContext", context))
    try:
        yield exporter, events
    finally:
        exporter.close()


class Peers(list[Any]):
    """Those that are linked, and what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, object]] = []

    def send(self, peer: object, message: object) -> None:
        self.sent.append((peer, message))


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
    ticket = new_ticket_id()
    first, second = peer_of(EXPORTER, REF), peer_of(EXPORTER, REF)
    nothing = cast("Any", None)
    importer._exporters[EXPORTER] = _Exporter(REF, nothing, nothing, nothing, first)
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
        importer = peer_of(IMPORTER).hello
        assert sender._tombstones.take(exported, importer) is None
        assert sender._tombstones.take(unknown, importer) is not None
        process.kill()


def test_another_workers_epoch_releases_none_of_its_exports() -> None:
    """A certificate proves a worker's name; its epoch is whatever its Hello contains."""
    with subprocess.Popen(["sleep", "60"]) as process, exporter_to(process) as (exporter, events):
        ticket, peers = reserve(exporter), cast("Peers", exporter._context.peers)
        thief, importer = peer_of(IMPORTER, worker="x"), peer_of(IMPORTER)
        peers += [thief, importer]
        exporter.export(ticket, Instant(0.0))
        exporter.tick()
        assert peers.sent == [(importer, Revoke((ticket,)))]
        sender = PrefillSender(exporter._context, exporter, cast("Any", None))
        sender.handle_message(thief, Release((ticket,)))
        assert events == []
        sender.handle_message(importer, Release((ticket,)))
        assert events == [ExportReleased(ticket)]
        process.kill()


def test_only_the_exporter_itself_revokes_and_acknowledges() -> None:
    """Not a peer that dialed, nor another worker whose tickets name the same epoch."""
    events: list[Any] = []
    context = SimpleNamespace(
        peers=Peers(), clock=ManualClock(), views=(), emit=events.append, view_to=lambda peer: None
    )
    importer = SharedBlockImporter(cast("AgentContext", context), ImportTable())
    other = peer_of(EXPORTER, WorkerRef(WorkerId("x"), EXPORTER, "127.0.0.1:3"))
    peer, dialer = peer_of(EXPORTER, REF), peer_of(EXPORTER, worker="p")
    nothing = cast("Any", None)
    importer._exporters[EXPORTER] = _Exporter(REF, nothing, nothing, nothing, peer)
    held, released = new_ticket_id(), new_ticket_id()
    importer.table.add(held, EXPORTER)
    importer.queue_release(released, EXPORTER)
    for stranger in (other, dialer):
        importer.peer_up(stranger)
        importer.handle_message(stranger, Revoke((held,)))
        importer.handle_message(stranger, ReleaseAck((released,)))
    assert events == []
    assert importer.table.has_pending(EXPORTER)
    assert importer.reach(other) is Reachability.NONE
    assert importer.explain(other) == "another worker has the epoch of x"
    importer.handle_message(peer, Revoke((held,)))
    importer.handle_message(peer, ReleaseAck((released,)))
    assert events == [ImportRevoked(held)]
    assert not importer.table.has_pending(EXPORTER)
