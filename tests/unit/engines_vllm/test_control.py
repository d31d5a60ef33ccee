from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.auth.key import ClusterKey
from baton.clock import read_clock_domain
from baton.engines.vllm.control import ControlApp, RankView
from baton.engines.vllm.identity import Identity, ModelFacts, RankFacts, describe_worker
from baton.engines.vllm.step_orders import Occupancy
from baton.events.blocks import EntriesRemoved, EntriesStored, pack_names
from baton.events.journal import BATON_HASHES, CacheJournal
from baton.events.wire import decode_page
from baton.ids import Epoch, TicketId, WorkerId
from baton.kv.layout import KVLayout
from baton.protocol.worker_http import MAX_ABORT_BYTES, MeasuredLink, MeasuredLinks, StoreLoads
from baton.telemetry.trace import RequestSpan, TraceRing
from baton.telemetry.transfers import TransferTable
from baton.testing.clocks import ManualClock

KEY = ClusterKey(b"k" * 32)
BEARER = b"Bearer " + KEY.sign("http", b"worker").hex().encode()
TICKET = "ab" * 16
IDENTITY = Identity(WorkerId("v0"), Epoch("0" * 32), "decode", 1)
MODEL = ModelFacts("/models/m", "m", 4096, ("shared", "tcp"), None)
FACTS = RankFacts(
    "127.0.0.1:9",
    "http://127.0.0.1:10",
    "f" * 64,
    KVLayout.gqa(2, 4, 32, block_size=32, dtype="float32"),
)


@dataclass
class Reply:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, key: ClusterKey | None = None) -> None:
        self.is_alive = True
        self.occupancy: Occupancy | None = None
        self.given_up: list[tuple[TicketId, str]] = []
        self.store_loads: StoreLoads | None = None
        self.journal = CacheJournal()
        self.traces = TraceRing(4)
        registry = CollectorRegistry()
        Counter("baton_things", "Things.", registry=registry).inc()
        view = RankView(
            info=lambda: describe_worker(IDENTITY, MODEL, {0: FACTS}),
            is_alive=lambda: self.is_alive,
            occupancy=lambda: self.occupancy,
            abort_from_peer=lambda ticket, reason: self.given_up.append((ticket, reason)),
            traces=self.traces,
            transfers=TransferTable(IDENTITY.epoch, ManualClock()),
            registry=registry,
            links=self.describe_links,
            store_loads=lambda: self.store_loads,
            journal=self.journal,
        )
        self.app = ControlApp(view, key)

    async def describe_links(self) -> MeasuredLinks:
        return MeasuredLinks((MeasuredLink("p0", "pull", "tcp", 1e-4, 1e-9, 9, 1),))

    def ask(self, method: str, path: str, body: bytes = b"", bearer: bytes = b"") -> Reply:
        sent: list[dict[str, Any]] = []
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", bearer)] if bearer else []
        scope: Any = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(self.app(scope, receive, send))
        start, end = sent
        assert dict(start["headers"])[b"content-length"] == str(len(end["body"])).encode()
        return Reply(start["status"], end["body"])


def test_health_is_the_agents() -> None:
    client = Client()
    before, health = time.monotonic(), client.ask("GET", "/health").json
    assert health["status"] == "ok"
    assert before <= health["clock"]["at_s"] <= time.monotonic()
    assert health["clock"]["domain"] == read_clock_domain()
    client.is_alive = False
    reply = client.ask("GET", "/health")
    assert (reply.status, reply.json["status"]) == (503, "failed")


def test_the_health_says_how_full_vllm_is_once_that_is_known() -> None:
    client = Client()
    assert client.ask("GET", "/health").json["load"] is None
    client.occupancy = Occupancy(num_waiting=3, num_blocks=8, num_free_blocks=2, block_size=32)
    load = client.ask("GET", "/health").json["load"]
    assert load == {"num_waiting": 3, "num_blocks": 8, "num_free_blocks": 2, "block_size": 32}
    client.store_loads = StoreLoads(2, 640, 0.5)
    loads = client.ask("GET", "/health").json["load"]["store_loads"]
    assert loads == {"num_loads": 2, "num_tokens": 640, "seconds": 0.5}


def test_what_the_store_has_is_reported() -> None:
    client, names = Client(), pack_names([1, 2])
    stored = EntriesStored("5" * 32, bytes(16), 64, names)
    client.journal.add_of_store(stored)
    page = decode_page(client.ask("GET", "/baton/v1/kv_events/0").body, BATON_HASHES)
    assert page.events == (stored,)
    removed = EntriesRemoved("5" * 32, bytes(16), 64, pack_names([2]))
    client.journal.add_of_store(removed)
    page = decode_page(client.ask("GET", f"/baton/v1/kv_events/{page.last}").body, BATON_HASHES)
    assert page.events == (removed,)
    for path in ("x", "-1", "9" * 19):
        assert client.ask("GET", f"/baton/v1/kv_events/{path}").status == 404
    assert client.ask("POST", "/baton/v1/kv_events/0").status == 405


def test_who_waits_for_events_does_not_delay_the_end() -> None:
    client = Client()
    began = time.monotonic()
    client.ask("GET", "/baton/v1/kv_events/0")
    assert time.monotonic() - began > 0.5, "it waits where nothing has happened"
    client.app.begin_end()
    took_s = []
    for _ in range(5):  # a busy machine may hold up some of them
        began = time.monotonic()
        assert client.ask("GET", "/baton/v1/kv_events/0").status == 200
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 0.5


def test_the_info_says_who_it_is() -> None:
    info = Client().ask("GET", "/baton/v1/info").json
    assert (info["worker"], info["epoch"], info["role"]) == ("v0", "0" * 32, "decode")
    assert (info["protocol"], info["rank_addresses"]) == ("vllm", [])
    assert info["handoff_address"] == "127.0.0.1:9"
    assert info["control_urls"] == ["http://127.0.0.1:10"]


def test_a_trace_is_found_by_the_gateways_request_id() -> None:
    client = Client()
    client.traces.add(RequestSpan(request_id="req-1", worker="v0", epoch="0" * 32, role="decode"))
    assert client.ask("GET", "/baton/v1/traces/req-1").json["role"] == "decode"
    assert client.ask("GET", "/baton/v1/traces/req-2").status == 404


def test_an_abort_reaches_the_rank() -> None:
    client = Client()
    path = f"/baton/v1/handoffs/{TICKET}/abort"
    assert client.ask("POST", path, b'{"reason": "p is gone"}').status == 204
    assert client.given_up == [(TicketId(bytes.fromhex(TICKET)), "p is gone")]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (f"/baton/v1/handoffs/{TICKET}/abort", b"", 400),
        (f"/baton/v1/handoffs/{TICKET}/abort", b"\xff", 400),
        (f"/baton/v1/handoffs/{TICKET}/abort", b'{"reason": 1}', 400),
        (
            f"/baton/v1/handoffs/{TICKET}/abort",
            b'{"reason": "' + b"x" * MAX_ABORT_BYTES + b'"}',
            400,
        ),
        ("/baton/v1/handoffs/abc/abort", b'{"reason": ""}', 404),
        ("/baton/v1/handoffs/xyz/abort", b'{"reason": ""}', 404),
        ("/baton/v1/info", b"", 405),
        ("/nothing", b"", 405),
    ],
)
def test_what_makes_no_sense_is_answered(path: str, body: bytes, status: int) -> None:
    client = Client()
    reply = client.ask("POST", path, body)
    assert (reply.status, client.given_up) == (status, [])
    assert reply.json["error"]["message"]


def test_measured_links_are_shown() -> None:
    client = Client(ClusterKey(b"k" * 32))
    assert client.ask("GET", "/baton/v1/links").status == 401
    reply = client.ask("GET", "/baton/v1/links", bearer=BEARER)
    assert (reply.status, reply.json["links"][0]["peer"]) == (200, "p0")
    assert client.ask("POST", "/baton/v1/links", bearer=BEARER).status == 405


def test_unknown_paths_and_methods() -> None:
    assert Client().ask("GET", "/nothing").status == 404
    assert Client().ask("GET", f"/baton/v1/handoffs/{TICKET}/abort").status == 405


def test_metrics_are_prometheus_text() -> None:
    assert b"baton_things_total 1.0" in Client().ask("GET", "/metrics").body


def test_beyond_loopback_a_bearer_is_needed_for_all_but_health() -> None:
    client = Client(KEY)
    assert client.ask("GET", "/health").status == 200
    assert client.ask("GET", "/baton/v1/info").status == 401
    assert client.ask("GET", "/baton/v1/info", bearer=b"Bearer no").status == 401
    assert client.ask("GET", "/baton/v1/info", bearer=BEARER).status == 200
    path = f"/baton/v1/handoffs/{TICKET}/abort"
    assert client.ask("POST", path, b'{"reason": "x"}').status == 401
    assert client.given_up == []
