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
from baton.launch.autoscaler import RETRY_AFTER_S, Autoscaler, DemandReader, make_options
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetMember, FleetStatus
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
    """Implements the part of `FleetControl` that is used: workers are there at once."""

    def __init__(self):
        self.counts, self.asked, self.refusal = {"prefill": 1, "decode": 1}, [], None

    async def status(self):
        members = [
            FleetMember(name=f"{role}-{n}", role=role, state="ready", host="h")
            for role, num in self.counts.items()
            for n in range(num)
        ]
        return FleetStatus(fleet="f", backend="local", version="1", members=tuple(members))

    async def scale(self, size):
        self.asked.append(size)
        if self.refusal is not None:
            raise FleetError(self.refusal)
        for role in ("prefill", "decode"):
            self.counts[role] = getattr(size, role) or self.counts[role]
        yield "done"


class Traffic:
    """A gateway's count of requests."""

    def __init__(self, clock):
        self.clock, self.num_begun = clock, 0

    def report(self):
        demand = ModelDemand(
            model="demo",
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
        assert len(fleet.asked) == 1
        look(autoscaler, clock, traffic, int(RETRY_AFTER_S / 5), rate=8)
        assert len(fleet.asked) == 2


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


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\xff"])
def test_garbage_changes_nothing(body):
    clock, fleet = ManualClock(), Fleet()
    with pages(lambda: body) as gateway:
        autoscaler, _ = make(gateway, clock, fleet)
        look(autoscaler, clock, Traffic(clock), 3, rate=50)
    assert fleet.asked == []


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"scaling\.min_decode is 5"):
        make_options(ScalingSection(min_decode=5, max_decode=2))
