from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant
from baton.gateway.app import Access, DebugPages, GatewayApp, RequestOrigin
from baton.gateway.clients import Clients
from baton.gateway.debug import LinkList, ListedWorker, WorkerList
from baton.gateway.kv_events import KVEvents
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.upstream import Upstream
from baton.gateway.workers import Preemption, Workers
from baton.protocol.worker_http import Health, Role, WorkerLoad
from baton.router.load import FleetLoad
from baton.router.placement import Placement
from baton.testing.clocks import ManualClock
from tests.unit.gateway.test_workers import info

URL = "http://10.0.0.5:8000"
KEY = Credentials.of(ClusterKey(b"k" * 32))


@pytest.fixture
def workers() -> Workers:
    return Workers([WorkerAddress(URL, Role.DECODE)], GatewayMetrics())


def follow(workers: Workers, clock: ManualClock) -> KVEvents:
    addresses = (WorkerAddress(URL, Role.DECODE),)
    upstream = Upstream(GatewayOptions(addresses=addresses, credentials=KEY, tls="off"))
    return KVEvents(workers, GatewayMetrics(), clock, upstream=upstream)


@pytest.fixture
def worker_list(workers) -> WorkerList:
    clock = ManualClock()
    return WorkerList(workers, follow(workers, clock), FleetLoad(), clock)


def only(worker_list: WorkerList) -> ListedWorker:
    (worker,) = worker_list.show().workers
    return worker


def test_each_state_is_shown_with_its_reason(workers, worker_list):
    worker = workers.all[0]
    assert (only(worker_list).state, only(worker_list).reason) == ("pending", "not asked yet")
    assert (only(worker_list).worker, only(worker_list).epoch) == (None, None)
    workers.register(worker, info())
    shown = only(worker_list)
    assert shown == ListedWorker(
        "decode-0", "e" * 32, URL, Role.DECODE, "up", reason=None, kv_events=None, given=shown.given
    )
    workers.drain(worker)
    assert (only(worker_list).state, only(worker_list).reason) == ("draining", None)
    workers.drain(worker, Preemption("its machine will be taken", Instant(9.0)))
    assert only(worker_list).reason == "its machine will be taken"
    workers.lose(worker, "gone")
    assert (only(worker_list).state, only(worker_list).reason) == ("down", "gone")
    assert only(worker_list).worker == "decode-0"
    workers.reject(worker, "too old")
    assert (only(worker_list).state, only(worker_list).reason) == ("rejected", "too old")


def test_the_load_is_what_the_worker_said_last(workers, worker_list):
    worker = workers.all[0]
    workers.register(worker, info())
    assert only(worker_list).load is None
    load = WorkerLoad(num_waiting=1, num_blocks=8, num_free_blocks=3, block_size=16)
    workers.note_report(worker, Health(load=load))
    assert only(worker_list).load == load
    shown = json.loads(msgspec.json.encode(worker_list.show()))["workers"][0]["load"]
    assert shown == {"num_waiting": 1, "num_blocks": 8, "num_free_blocks": 3, "block_size": 16}


def get(
    worker_list: WorkerList, workers: Workers, client: str, method: str = "GET"
) -> tuple[int, Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    origin = RequestOrigin(None, frozenset())
    access = Access(origin, origin, Clients(None, ManualClock()), is_managed_here=True)
    links = LinkList(workers, FleetLoad())
    pages = DebugPages(None, worker_list, None, None, links, *[None] * 4)
    app = GatewayApp(None, workers, GatewayMetrics(), debug=pages, readiness=None, access=access)
    scope = {
        "type": "http", "path": "/debug/workers", "method": method, "client": (client, 1),
        "headers": [],
    }  # fmt: skip
    asyncio.run(app(scope, None, send))
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent))


def test_workers_are_shown_to_this_machine_alone(workers, worker_list):
    status, page = get(worker_list, workers, "127.0.0.1")
    assert (status, page["workers"][0]["url"]) == (200, URL)
    assert get(worker_list, workers, "10.0.0.7")[0] == 404
    assert get(worker_list, workers, "127.0.0.1", "POST")[0] == 405


def test_what_this_gateway_gave_it_is_shown(workers):
    worker, load, clock = workers.all[0], FleetLoad(), ManualClock()
    workers.register(worker, info())
    (view,) = workers.fleet.models[info().served_model_name].decodes
    load.begin(Placement(None, view), 1000, clock.now())
    worker_list = WorkerList(workers, follow(workers, clock), load, clock)
    given = only(worker_list).given
    assert (given.num_prefills, given.num_decodes) == (1, 1)
    assert given.queue_s == pytest.approx(given.prefill.fixed_s + 1000 * given.prefill.each_s)
    assert given.prefill.num_seen == 0
