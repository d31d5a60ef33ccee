"""Which decode workers hear of which prompts, and that a silent engine is vouched for by nobody."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.auth.ticket import Ticket, WorkerRef
from baton.errors import ProtocolError
from baton.handoff.heartbeat import MAX_KEEPALIVE_INTERVAL_S, EngineHeartbeat, HeartbeatPublisher
from baton.handoff.messages import MAX_BATCH, Keepalive, decode, encode
from baton.ids import Epoch, WorkerId
from baton.testing.clocks import ManualClock
from tests.unit.handoff.orders import make_ticket


class Told:
    """Stands where a context does: four links, and what is said over them."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.clock, self.timeout_s = ManualClock(), timeout_s
        self.peers, self.said = self, []
        self.links = [link("ed"), link("other"), link("ed", dialed=True), link("ed", worker="x")]

    def __iter__(self) -> object:
        return iter(self.links)

    def send(self, peer: object, message: Keepalive) -> None:
        self.said.append((self.links.index(peer), message))


def link(epoch: str, *, worker: str = "d", dialed: bool = False) -> SimpleNamespace:
    return SimpleNamespace(hello=SimpleNamespace(worker=worker, epoch=epoch), dialed=dialed or None)


def ticket_for(epoch: str) -> Ticket:
    return make_ticket(decode=WorkerRef(WorkerId("d"), Epoch(epoch), "127.0.0.1:2"))


def start(timeout_s: float = 60.0) -> tuple[Told, EngineHeartbeat, HeartbeatPublisher]:
    context = Told(timeout_s)
    heartbeat = EngineHeartbeat(context.clock)
    return context, heartbeat, HeartbeatPublisher(context, heartbeat)  # type: ignore[arg-type]


def test_each_decode_worker_hears_of_its_own_prompts_over_the_link_that_it_dialed() -> None:
    context, heartbeat, vouching = start()
    mine, others, gone = (ticket_for(epoch) for epoch in ("ed", "other", "gone"))
    heartbeat.report_progress([mine, others, gone])
    context.clock.advance(0.25)
    vouching.tick()
    assert context.said == [(0, Keepalive(0.25, (mine.id,))), (1, Keepalive(0.25, (others.id,)))]


def test_nothing_is_said_for_an_engine_that_gives_no_sign_of_life() -> None:
    context, heartbeat, vouching = start()
    assert vouching.tick() is None or not context.said
    heartbeat.report_progress([ticket_for("ed")])
    for _ in range(3):
        context.clock.advance(2 * MAX_KEEPALIVE_INTERVAL_S)
        vouching.tick()
    assert len(context.said) == 1
    heartbeat.tick()
    context.clock.advance(2 * MAX_KEEPALIVE_INTERVAL_S)
    vouching.tick()
    assert context.said[1] == (
        0,
        Keepalive(2 * MAX_KEEPALIVE_INTERVAL_S, context.said[0][1].tickets),
    )


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(60.0, 1.0), (2.0, 0.5)])
def test_it_is_said_now_and_then_only(timeout_s: float, interval_s: float) -> None:
    context, heartbeat, vouching = start(timeout_s)
    for _ in range(100):
        heartbeat.report_progress([ticket_for("ed")])
        vouching.tick()
        context.clock.advance(0.1)
    assert len(context.said) == pytest.approx(10 / interval_s, abs=1)


def test_a_long_queue_takes_several_messages() -> None:
    context, heartbeat, vouching = start()
    tickets = [ticket_for("ed") for _ in range(MAX_BATCH + 1)]
    heartbeat.report_progress(tickets)
    vouching.tick()
    said = [message.tickets for _, message in context.said]
    assert list(map(len, said)) == [MAX_BATCH, 1]
    assert [ticket for some in said for ticket in some] == [ticket.id for ticket in tickets]


@pytest.mark.parametrize("idle_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_an_age_that_is_none_is_refused(idle_s: float) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(Keepalive(idle_s, ())))
