"""The autoscaler's loop: what it reads over HTTP, and what it asks of a fleet."""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest

from baton.config.sections import ScalingSection
from baton.errors import ConfigError
from baton.launch.autoscaler import Autoscaler, DemandReader, make_options
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetMember, FleetStatus
from baton.launch.role_changes import RETRY_AFTER_S, SLOW_S, count_members
from baton.protocol.demand import DemandReport, EndedAnswer, ModelDemand, RequestShape
from baton.testing.clocks import ManualClock

SHAPE = RequestShape(0.3, 0.01, 100.0, 0.01, 0.0004, None)


@contextmanager
def pages(report):
    """A server with a gateway's page; `report()` is its body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = report()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Fleet:
    """Implements the part of `FleetControl` that is used: workers are there at once.

    Those of the roles in `without_room` wait for a machine until `room` is set.
    """

    def __init__(self):
        self.counts, self.asked, self.refusal = {"prefill": 1, "decode": 1}, [], None
        self.states, self.without_room, self.room = {}, set(), asyncio.Event()

    async def status(self):
        members = [
            FleetMember(
                name=f"{role}-{n}", role=role, state=self.states.get(f"{role}-{n}", "ready"),
                host="h", reason="Ray has no host for it" if role in self.without_room else "",
            )
            for role, num in self.counts.items()
            for n in range(num)
        ]  # fmt: skip
        return FleetStatus(fleet="f", backend="local", version="1", members=tuple(members))

    async def scale(self, size):
        self.asked.append(size)
        if self.refusal is not None:
            raise FleetError(self.refusal)
        for role in ("prefill", "decode"):
            had, num = self.counts[role], getattr(size, role) or self.counts[role]
            self.counts[role] = num
            added = {f"{role}-{n}" for n in range(had, num)}
            if added and role in self.without_room:
                self.states |= dict.fromkeys(added, "starting")
                await self.room.wait()
                self.states = {k: v for k, v in self.states.items() if k not in added}
        yield "done"


class Traffic:
    """A gateway's count of requests."""

    def __init__(self, clock):
        self.clock, self.num_begun, self.model = clock, 0, "demo"

    def report(self):
        demand = ModelDemand(
            model=self.model,
            num_begun=self.num_begun,
            num_waiting=0,
            window_s=30.0,
            ended=(EndedAnswer(0.5, 0.02),) * 30,
            shape=SHAPE,
        )
        return msgspec.json.encode(DemandReport("one", (demand,)))


def look(autoscaler, clock, traffic, num_looks, rate):
    async def run():
        for _ in range(num_looks):
            clock.advance(5.0)
            traffic.num_begun += int(5 * rate)
            await autoscaler.step()
            await asyncio.sleep(0)  # changes run in the background

    asyncio.run(run())


def make(gateway, clock, fleet, **settings):
    options = make_options(ScalingSection(max_prefill=9, max_decode=9, **settings))
    lines = []
    return Autoscaler(
        fleet, DemandReader([gateway], None), options, clock, on_line=lines.append
    ), lines


def test_a_fleet_grows_with_its_traffic_and_shrinks_after_a_while():
    clock, fleet = ManualClock(), Fleet()
    traffic = Traffic(clock)
    with pages(traffic.report) as gateway:
        autoscaler, lines = make(gateway, clock, fleet, shrink_after_s=60.0)
        look(autoscaler, clock, traffic, 12, rate=8)
        assert fleet.counts["prefill"] >= 8 * SHAPE.prefill_s
        assert any("requests/s need" in line for line in lines)
        look(autoscaler, clock, traffic, 60, rate=0.4)
    assert fleet.counts == {"prefill": 1, "decode": 1}


def test_a_refused_size_is_tried_again_later():
    clock, fleet = ManualClock(), Fleet()
    fleet.refusal = "no host has room"
    traffic = Traffic(clock)
    with pages(traffic.report) as gateway:
        autoscaler, _ = make(gateway, clock, fleet, grow_every_s=1.0)
        look(autoscaler, clock, traffic, int(RETRY_AFTER_S / 5), rate=8)
        asked = sorted(size.prefill is None for size in fleet.asked)
        assert asked in ([False], [True], [False, True]), "each role once"
        look(autoscaler, clock, traffic, int(RETRY_AFTER_S / 5) + 2, rate=8)
        assert len(fleet.asked) == 2 * len(asked)


def test_decisions_go_on_for_a_role_while_the_other_waits_for_a_machine(caplog):
    clock, fleet = ManualClock(), Fleet()
    fleet.without_room.add("prefill")
    traffic = Traffic(clock)

    def metric(name, **labels):
        return autoscaler.changes.metrics.registry.get_sample_value(f"baton_scaling_{name}", labels)

    async def looks(num_looks, rate):
        for _ in range(num_looks):
            clock.advance(5.0)
            traffic.num_begun += int(5 * rate)
            await autoscaler.step()
            await asyncio.sleep(0)

    async def scenario():
        await looks(6, rate=8)
        waiting = fleet.counts["prefill"]
        assert waiting > 1
        assert metric("workers", role="prefill", state="starting") == waiting - 1
        await looks(int(SLOW_S / 5) + 2, rate=25)
        assert fleet.counts["decode"] > 1
        assert fleet.counts["prefill"] == waiting, "one change of a role at a time"
        assert metric("change_age_seconds", role="prefill") >= SLOW_S
        assert metric("changes_total", role="prefill", result="done") is None
        assert "prefill-1 (starting: Ray has no host for it)" in caplog.text
        fleet.room.set()
        await looks(2, rate=8)
        assert metric("change_age_seconds", role="prefill") == 0
        assert metric("changes_total", role="prefill", result="done") >= 1

    with pages(traffic.report) as gateway:
        autoscaler, _ = make(gateway, clock, fleet)
        asyncio.run(scenario())


def test_a_change_without_an_effect_is_not_repeated_at_each_look():
    """On Kubernetes a failed pod keeps its place, and `scale` to the same number does nothing."""
    clock, fleet = ManualClock(), Fleet()
    fleet.counts["decode"], fleet.states["decode-1"] = 2, "failed"
    traffic = Traffic(clock)
    with pages(traffic.report) as gateway:
        autoscaler, _ = make(gateway, clock, fleet, min_decode=2)
        look(autoscaler, clock, traffic, int(RETRY_AFTER_S / 5), rate=0.2)
        assert [size.decode for size in fleet.asked] == [2]


def test_who_counts_as_a_member():
    states = ("starting", "ready", "draining", "ended", "failed")
    members = tuple(
        FleetMember(name=f"decode-{n}", role="decode", state=state, host="h")
        for n, state in enumerate(states)
    )
    status = FleetStatus(fleet="f", backend="ray", version="1", members=members)
    present, starting = count_members(status)
    assert (present.decode, starting.decode) == (2, 1)


def test_each_address_of_a_name_is_a_gateway(monkeypatch, caplog):
    clock = ManualClock()
    with pages(Traffic(clock).report) as gateway:
        port = int(gateway.rpartition(":")[2])
        addresses = ["127.0.0.1", "127.0.0.2"]  # nothing listens at the second one

        resolve_really = socket.getaddrinfo

        def resolve(name, asked, *rest, **options):
            if name == "other":
                raise OSError(-2, "Name or service not known")
            if name == "gateways":
                return [(None, None, None, "", (each, asked)) for each in addresses]
            return resolve_really(name, asked, *rest, **options)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        reader = DemandReader([f"dns:http://gateways:{port}", "dns:http://other:1"], None)
        reports = asyncio.run(reader.read())
    assert list(reports) == [f"http://127.0.0.1:{port}"]
    assert "other does not resolve: Name or service not known" in caplog.text
    assert f"http://127.0.0.2:{port}" in caplog.text


def test_a_fleet_that_serves_another_model_is_scaled_by_that_one():
    clock, fleet = ManualClock(), Fleet()
    traffic = Traffic(clock)
    with pages(traffic.report) as gateway:
        autoscaler, _ = make(gateway, clock, fleet)
        look(autoscaler, clock, traffic, 2, rate=0.2)
        traffic.model = "demo-2"
        look(autoscaler, clock, traffic, 6, rate=8)
    assert fleet.counts["prefill"] > 1


def report(*models):
    shown = tuple(
        ModelDemand(
            model=model, num_begun=0, num_waiting=0, window_s=30.0, ended=(), shape=SHAPE
        )
        for model in models
    )  # fmt: skip
    return {"http://gateway": DemandReport("one", shown)}


def test_the_model_is_the_only_one_that_is_reported(caplog):
    demand = DemandReader([], None)
    found = [demand.find_model(report(*each)) for each in ("", "a", "", "ab", "b")]
    assert found == [None, "a", "a", None, "b"], "of a fleet without workers the last one"
    assert "they serve a, b: set scaling.model" in caplog.text


def test_a_configured_model_that_no_gateway_reports_is_a_warning(caplog):
    demand = DemandReader([], "a")
    assert [demand.find_model(report(*each)) for each in ("", "ab")] == ["a", "a"]
    assert not caplog.messages
    assert demand.find_model(report("b")) == "a"
    assert "they serve b: scaling.model is a" in caplog.text


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\xff"])
def test_garbage_changes_nothing(body):
    clock, fleet = ManualClock(), Fleet()
    with pages(lambda: body) as gateway:
        autoscaler, _ = make(gateway, clock, fleet)
        look(autoscaler, clock, Traffic(clock), 3, rate=50)
    assert fleet.asked == []


def test_the_time_between_looks_decides_what_a_silence_is():
    assert make_options(ScalingSection(interval_s=90.0)).longest_gap_s == 180.0


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"scaling\.min_decode is 5"):
        make_options(ScalingSection(min_decode=5, max_decode=2))
