from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from baton.auth.ticket import WorkerRef
from baton.clock import Instant
from baton.errors import ModelNotFoundError, ProtocolError
from baton.gateway.errors import NoWorkerError
from baton.gateway.members.member_set import Listing
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.worker_info import read_info
from baton.gateway.workers import Down, Draining, Pending, Preemption, Rejected, Up, Workers
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Health, Role, WorkerInfo, WorkerLoad
from baton.router.health import EjectionCause

LOAD = WorkerLoad(num_waiting=1, num_blocks=9, num_free_blocks=5, block_size=16)
FIELDS = {
    "worker": "decode-0",
    "epoch": "e" * 32,
    "role": "decode",
    "model": "/models/demo",
    "served_model_name": "demo",
    "fingerprint": "f",
    "max_context_tokens": 4096,
    "handoff_address": "127.0.0.1:1",
    "layout": {"anything": 1},
    "transports": ["tcp"],
    "version": "0.1.0",
}


def info(**changes: object) -> WorkerInfo:
    return read_info(json.dumps({**FIELDS, **changes}).encode())


@pytest.fixture
def workers() -> Workers:
    addresses = (
        WorkerAddress("http://127.0.0.1:1", Role.PREFILL),
        WorkerAddress("http://127.0.0.1:2", Role.DECODE),
        WorkerAddress("http://127.0.0.1:3", Role.DECODE),
    )
    return Workers(addresses, GatewayMetrics())


def up_gauge(workers: Workers, url: str) -> float | None:
    labels = {"url": url, "role": "decode"}
    return workers._metrics.registry.get_sample_value("baton_gateway_worker_up", labels)


def test_a_worker_that_tells_who_it_is_can_be_placed_on(workers):
    decode = workers.all[1]
    assert isinstance(decode.state, Pending)
    workers.register(decode, info())
    assert decode.state == Up(info())
    (view,) = workers.fleet.models["demo"].decodes
    assert view.available
    assert view.ref == WorkerRef(WorkerId("decode-0"), Epoch("e" * 32), "127.0.0.1:1")
    assert workers.of(view) is decode
    assert up_gauge(workers, "http://127.0.0.1:2") == 1


def test_a_lost_worker_is_remembered_but_not_placed_on(workers):
    decode = workers.all[1]
    workers.register(decode, info())
    workers.lose(decode, "gone")
    assert decode.state == Down(info(), "gone")
    assert not workers.fleet.can_decode
    assert "demo" in workers.fleet.models
    assert up_gauge(workers, "http://127.0.0.1:2") == 0
    assert "decode-0: gone" in workers.why_not_ready()
    assert workers.context_lengths() == {}


def test_a_worker_that_never_came_is_still_unseen_when_it_is_lost(workers):
    workers.lose(workers.all[1], "refused")
    assert workers.all[1].state == Pending("refused")


def test_a_draining_worker_is_not_placed_on(workers):
    workers.register(workers.all[1], info())
    workers.drain(workers.all[1])
    assert workers.all[1].state == Draining(info())
    assert not workers.fleet.can_decode


def test_the_first_preemption_notice_of_a_worker_counts(workers, caplog):
    decode = workers.all[1]
    workers.register(decode, info())
    workers.drain(decode)
    notice = Preemption("its machine will be taken", Instant(30.0))
    workers.drain(decode, notice)
    workers.drain(decode, Preemption(notice.reason, Instant(30.1)))
    workers.drain(decode)
    assert decode.state == Draining(info(), notice)
    assert [r.levelname for r in caplog.records if notice.reason in r.message] == ["WARNING"]
    workers.lose(decode, "one probe came late")
    workers.drain(decode, Preemption(notice.reason, Instant(30.2)))
    assert decode.state == Draining(info(), notice)
    registry = workers._metrics.registry
    assert registry.get_sample_value("baton_gateway_preempted_workers_total") == 1
    assert f"draining: {notice.reason}" in workers.why_not_ready()

    workers.register(decode, info(epoch="a" * 32))
    workers.drain(decode)
    assert decode.state == Draining(info(epoch="a" * 32)), "the notice was for another life"
    workers.drain(decode, notice)
    assert registry.get_sample_value("baton_gateway_preempted_workers_total") == 2


def test_a_new_epoch_is_a_new_worker(workers, caplog):
    workers.register(workers.all[1], info())
    with caplog.at_level(logging.INFO):
        workers.register(workers.all[1], info(epoch="a" * 32))
    (view,) = workers.fleet.models["demo"].decodes
    assert view.ref.epoch == "a" * 32
    assert "has started again" in caplog.text


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("listed", [0, 1])
def test_the_role_must_fit_the_list(workers, role, listed):
    worker = workers.all[listed]
    workers.register(worker, info(role=role))
    fits = role in {worker.address.role, "both"}
    assert isinstance(worker.state, Up if fits else Rejected)
    if fits:
        (view,) = (*workers.fleet.models["demo"].prefills, *workers.fleet.models["demo"].decodes)
        assert view.role is worker.address.role
    else:
        assert f"--{role}" in worker.state.reason


def test_two_workers_of_one_name_are_one_too_many(workers):
    workers.register(workers.all[1], info())
    workers.register(workers.all[2], info(epoch="a" * 32))
    assert isinstance(workers.all[1].state, Up)
    assert isinstance(workers.all[2].state, Rejected)
    assert "http://127.0.0.1:2 is called decode-0 already" in workers.all[2].state.reason


@pytest.mark.parametrize("end", ["refused", "drained"])
def test_a_name_goes_to_its_next_worker_though_the_one_that_ended_is_still_listed(workers, end):
    """As a pod of a StatefulSet, whose old address stays in DNS for a while."""
    _, before, after = workers.all
    workers.register(before, info())
    if end == "drained":
        workers.drain(before)
    else:
        before.health.lose(EjectionCause.GONE, 1.0, "refused")
    workers.lose(before, "no answer")
    workers.register(after, info(epoch="a" * 32))
    assert after.state == Up(info(epoch="a" * 32))
    assert workers.with_id(WorkerId("decode-0")) is after
    (view,) = workers.fleet.models["demo"].decodes
    assert workers.of(view) is after
    workers.lose(before, "no answer")
    assert isinstance(before.state, Pending)
    workers.register(before, info())
    assert isinstance(before.state, Rejected)
    assert workers.with_id(WorkerId("decode-0")) is after


def test_a_worker_that_is_silent_keeps_its_name(workers):
    """It may have been stopped, and go on."""
    _, before, after = workers.all
    workers.register(before, info())
    workers.drain(before)
    workers.register(before, info())  # it takes requests again
    before.health.lose(EjectionCause.LATE, 1.0, "late")
    workers.lose(before, "no answer in time")
    workers.register(after, info(epoch="a" * 32))
    assert isinstance(after.state, Rejected)
    assert workers.with_id(WorkerId("decode-0")) is before


def test_a_change_is_logged_once(workers, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            workers.lose(workers.all[1], "refused")
        for _ in range(3):
            workers.register(workers.all[1], info())
        for reason in ("refused", "timed out", "refused"):
            workers.lose(workers.all[1], reason)
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO", "WARNING"]


def test_what_clients_are_told_about_an_unknown_model(workers):
    assert isinstance(workers.why_not_served("x"), NoWorkerError)
    workers.register(workers.all[1], info())
    assert isinstance(workers.why_not_served("x"), NoWorkerError), "the other one may serve it"
    workers.lose(workers.all[2], "refused")
    error = workers.why_not_served("x")
    assert isinstance(error, ModelNotFoundError)
    assert "'demo'" in str(error)


def test_of_several_context_lengths_the_least_is_told(workers):
    workers.register(workers.all[1], info(max_context_tokens=100))
    workers.register(workers.all[2], info(worker="decode-1", max_context_tokens=50))
    assert workers.context_lengths() == {"demo": 50}


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "short"},
        {"role": "chef"},
        {"worker": ""},
        {"worker": "x" * 257},
        {"served_model_name": None},
        {"transports": "tcp"},
        {"max_context_tokens": "many"},
        {"max_context_tokens": 0},
    ],
)
def test_a_description_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ProtocolError):
        info(**changes)


def test_reports_of_many_workers_are_taken_up_together():
    workers = Workers(
        [WorkerAddress(f"http://127.0.0.1:{port}", Role.DECODE) for port in range(1, 101)],
        GatewayMetrics(),
    )
    fleets = []
    workers.on_change = fleets.append

    async def report() -> None:
        for number, worker in enumerate(workers.all):
            workers.register(worker, info(worker=f"decode-{number}"))
            workers.note_report(worker, Health(load=LOAD))
        assert not fleets
        async with asyncio.timeout(30):
            while not fleets:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)

    asyncio.run(report())
    (fleet,) = fleets
    views = fleet.models["demo"].decodes
    assert len(views) == 100
    assert {view.load for view in views} == {LOAD}


def test_what_is_placed_on_is_there_when_a_worker_of_many_comes_back_under_another_name():
    workers = Workers(
        [WorkerAddress(f"http://127.0.0.1:{port}", Role.DECODE) for port in range(1, 101)],
        GatewayMetrics(),
    )

    async def restart() -> None:
        for number, worker in enumerate(workers.all):
            workers.register(worker, info(worker=f"decode-{number}"))
        async with asyncio.timeout(30):
            while not workers.fleet.models:
                await asyncio.sleep(0.01)
        workers.register(workers.all[3], info(worker="another", epoch="b" * 32))
        placed_on = [workers.of(view) for view in workers.fleet.models["demo"].decodes]
        assert placed_on == list(workers.all)

    asyncio.run(restart())


def test_a_view_is_another_one_only_where_something_has_changed(workers):
    decode = workers.all[1]
    workers.register(decode, info())
    (before,) = workers.fleet.models["demo"].decodes
    workers.lose(workers.all[2], "refused")
    assert workers.fleet.models["demo"].decodes[0] is before
    workers.note_report(decode, Health(load=LOAD))
    (loaded,) = workers.fleet.models["demo"].decodes
    assert (before.load, loaded.load) == (None, LOAD)
    for _ in range(5):
        decode.health.failed(1e6 * (1 + decode.health.num_failed_requests), "5xx", may_eject=True)
    workers.note_health(decode)
    (ejected,) = workers.fleet.models["demo"].decodes
    assert (ejected.available, ejected.ejected) == (False, True)


def test_what_a_worker_does_not_report_of_its_topology_is_as_its_source_knows_it(workers):
    worker = workers.all[1]
    listing = Listing(Role.DECODE, ("kubernetes",), topology="zone-a//node-1")

    def find_topology() -> str:
        (view,) = workers.fleet.models["demo"].decodes
        return view.topology

    workers.register(worker, info(topology="/rack-3/boot-5"))
    assert find_topology() == "/rack-3/boot-5"
    workers.set_members({worker.url: listing})
    assert find_topology() == "zone-a/rack-3/boot-5"
    workers.register(worker, info(epoch="f" * 32))
    assert find_topology() == "zone-a//node-1"
    workers.set_members({worker.url: replace(listing, topology="")})
    assert find_topology() == ""


def test_workers_with_the_same_adapters_share_one_set(workers):
    """Each new fleet compares them, of 1,000 names each."""
    prefill, first, second = workers.all
    for worker, role in ((prefill, "prefill"), (first, "decode"), (second, "decode")):
        workers.register(worker, info(worker=str(worker.url), role=role), frozenset(["sql", "law"]))
    assert prefill.adapters is first.adapters is second.adapters
    workers.register(second, second.info, frozenset(["sql", "law"]))
    assert second.adapters is first.adapters
    workers.register(second, second.info, frozenset(["sql"]))
    assert (first.adapters, second.adapters) == ({"sql", "law"}, {"sql"})
    assert workers.fleet.adapters == {"sql": "demo", "law": "demo"}
