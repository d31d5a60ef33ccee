"""The gateway follows the KV events of vLLM servers, and shows what each holds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from baton.events.blocks import (
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    TiersListed,
    pack_ids,
    pack_names,
)
from baton.events.journal import CacheJournal
from baton.gateway.kv_events import VLLM_HASHES
from baton.ids import StoreId
from baton.models import DEMO_MODEL_PATH
from baton.protocol.worker_http import KV_EVENTS_PREFIX
from baton.tokenizer.digest import digest_tokenizer
from tests.free_ports import find_free_port
from tests.integration.gateway_cluster import Cluster, run, until, until_true, until_up
from tests.integration.scripted_publisher import ScriptedPublisher, stored
from tests.integration.scripted_vllm import ScriptedVllm, say_abc_as_vllm
from tests.integration.test_gateway_process import LEAVES_WITHIN_S, gateway_process
from tests.preloaded import wait_until_loaded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

GOLDEN = Path(__file__).parents[1] / "vectors" / "events" / "vllm-0.32.json"
HELD = 'baton_kv_blocks_held{group="0",medium="GPU",worker="vllm-d"}'
NOT_FOLLOWED = "baton_gateway_kv_events_not_followed_total"


@pytest.fixture
def ends(tmp_path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"


@pytest.fixture
def give_birth() -> Iterator[Callable[..., ScriptedPublisher]]:
    with contextlib.ExitStack() as stack:
        yield lambda *a, **o: stack.enter_context(contextlib.closing(ScriptedPublisher(*a, **o)))


def server_of(kv_events: object, role: str = "decode") -> ScriptedVllm:
    return ScriptedVllm("vllm-d", role, say_abc_as_vllm, kv_events=kv_events)


def run_with(
    kv_events: object, scenario: Callable[[Cluster, ScriptedVllm], Awaitable[None]], **setup
) -> None:
    """Run a scenario against a gateway with one decode server that says this of its events."""
    server = server_of(kv_events)

    async def with_server(cluster: Cluster) -> None:
        await scenario(cluster, server)

    run(with_server, prefills=0, decodes=[server], probe_interval_s=0.02, **setup)
    assert following_threads() == []


def following_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kv-events-")]


async def shown(cluster: Cluster) -> dict[str, Any]:
    """The only worker, on `/debug/workers`."""
    status, page = await cluster.get_json("/debug/workers")
    assert status == 200
    (worker,) = page["workers"]
    return worker


async def until_held(cluster: Cluster, num_blocks: int) -> None:
    async def held() -> bool:
        events = (await shown(cluster))["kv_events"]
        blocks = events and {(b["medium"], b["group"]): b["num_blocks"] for b in events["blocks"]}
        return bool(blocks) and blocks == {("GPU", 0): num_blocks}

    await until_true(held)
    assert await cluster.metric(HELD) == num_blocks


async def until_connected(cluster: Cluster) -> None:
    async def connected() -> bool:
        events = (await shown(cluster))["kv_events"]
        feed = events and events["feed"]
        return bool(feed) and feed["connected"] and feed["state"] == "in_sync"

    await until_true(connected)


async def until_series_are_gone(cluster: Cluster) -> None:
    async def gone() -> bool:
        async with cluster.client.get(cluster.url + "/metrics") as response:
            return "baton_kv_events_total{" not in await response.text()

    await until_true(gone)


def test_what_vllm_publishes_is_shown(ends, give_birth):
    golden = json.loads(GOLDEN.read_text())["messages"]
    payloads = [bytes.fromhex(payload) for _, _, payload in golden]
    publisher = give_birth(*ends, topic="kv@pod-1")

    async def scenario(cluster: Cluster, _server: ScriptedVllm):
        await until_connected(cluster)
        publisher.publish_bytes(payloads[0])
        await until_held(cluster, 2)
        publisher.publish(stored(5))
        await until_held(cluster, 3)
        publisher.publish_bytes(payloads[1])  # one removed, one stored
        publisher.publish(stored(6))
        await until_held(cluster, 4)
        publisher.publish_bytes(payloads[2])
        await until_held(cluster, 0)

        async def count(kind: str) -> float:
            return await cluster.metric(f'baton_kv_events_total{{type="{kind}",worker="vllm-d"}}')

        assert await count("BlockStored") == 4
        assert await count("BlockRemoved") == 1
        assert await count("AllBlocksCleared") == 1
        worker = await shown(cluster)
        assert (worker["worker"], worker["state"], worker["role"]) == ("vllm-d", "up", "decode")
        assert worker["kv_events"]["endpoint"] == ends[0]
        assert worker["kv_events"]["problem"] is None
        assert worker["kv_events"]["feed"]["last_seq"] == 4
        assert await cluster.metric(NOT_FOLLOWED) == 0

    run_with(publisher.source, scenario)


def test_what_a_vllm_servers_store_holds_is_asked_for_beside_what_it_publishes(ends, give_birth):
    publisher, tier = give_birth(*ends), StoreId("5" * 32)
    server = server_of(publisher.source)
    server.extra_info |= {"has_kv_journal": True}
    server.journal.add_of_store(TiersListed((tier,)))
    names = pack_names([1, 2, 3])
    server.journal.add_of_store(EntriesStored(tier, bytes(16), 64, names))
    in_store = 'baton_kv_blocks_held{group="0",medium="STORE",worker="vllm-d"}'

    async def until_known(cluster: Cluster, num_cached: int, num_stored: int) -> None:
        async def known() -> bool:
            blocks = await cluster.metric("baton_router_prefix_blocks")
            stored_blocks = await cluster.metric("baton_router_stored_blocks")
            return (blocks, stored_blocks) == (num_cached, num_stored)

        await until_true(known)

    async def scenario(cluster: Cluster) -> None:
        await until_connected(cluster)
        publisher.publish(stored(5))
        await until_known(cluster, 1, 3)
        assert await cluster.metric(in_store) == 3
        removed = EntriesRemoved(tier, bytes(16), 64, pack_names([3]))
        server.journal.add_of_store(removed)
        await until_known(cluster, 1, 2)
        publisher.publish({"type": "AllBlocksCleared"})
        await until_known(cluster, 0, 2)
        worker = await shown(cluster)
        (blocks,) = worker["store_events"]["blocks"]
        assert (blocks["medium"], blocks["num_blocks"]) == ("STORE", 2)
        assert worker["store_events"]["feed"]["last_seq"] == 3
        assert worker["kv_events"]["endpoint"] == ends[0]
        server.journal = CacheJournal()
        server.epoch = "9" * 32  # another life, which has reported nothing
        await until_known(cluster, 0, 0)

    run(scenario, prefills=0, decodes=[server], probe_interval_s=0.02, policy="prefix")
    assert following_threads() == []


def test_a_server_some_of_whose_events_are_lost_is_asked_to_report_what_it_has_cached(
    ends, give_birth
):
    """vLLM reports a block that stays cached once: what follows it could never be known."""
    publisher = give_birth(ends[0], None)
    server = server_of(publisher.source, "both")
    server.extra_info |= {
        "model": str(DEMO_MODEL_PATH), "tokenizer": digest_tokenizer(DEMO_MODEL_PATH)
    }  # fmt: skip

    async def scenario(cluster: Cluster) -> None:
        async def is_asked(token: int, **fields: object) -> object:
            body = {"model": "demo", "prompt": [token] * 40, "max_tokens": 3, **fields}
            async with cluster.post(body) as response:
                assert response.status == 200
            return server.visits[-1].body.get("vllm_xargs")

        async def until_cached(token: int, num_tokens: int) -> None:
            async def is_cached() -> bool:
                body = {"model": "demo", "prompt": [token] * 40}
                async with cluster.post(body, "/debug/route") as response:
                    return (await response.json())["cached_tokens"].get("vllm-d", 0) == num_tokens

            await until_true(is_cached)

        async def is_lost() -> bool:
            line = 'baton_kv_events_total{type="Lost",worker="vllm-d"}'
            return await cluster.metric(line) == 1

        await until_connected(cluster)
        assert await is_asked(3) is None
        publisher.publish(stored(8), is_lost=True)
        publisher.publish({**stored(9), "parent_block_hash": 8})
        await until_true(is_lost)
        assert await is_asked(2, vllm_xargs={"a": 7}) == {"a": 7, "kv_cache_report_mode": "full"}
        publisher.publish(stored(5, 6))  # what is reported to another request, of tokens 1
        await until_cached(1, 32)
        assert await is_asked(1) is None, "most of it is known"
        assert await is_asked(4) == {"kv_cache_report_mode": "full"}
        publisher.publish({"type": "AllBlocksCleared"})
        await until_cached(1, 0)
        assert await is_asked(5) is None

    run(scenario, prefills=0, decodes=[server], probe_interval_s=0.02, policy="prefix")


def test_a_server_of_another_host_is_asked_for_what_it_passes_on(tmp_path, give_birth):
    """Its publisher is out of reach there, and would authenticate nobody."""
    publisher = give_birth(f"ipc://{tmp_path}/live", None)
    server = server_of(publisher.source, "both")
    server.extra_info |= {
        "relays_kv_events": True, "handoff_address": f"0.0.0.0:{server.port + 1}"
    }  # fmt: skip
    for each in (server, *server.controls):
        each.url = each.url.replace("127.0.0.1", "0.0.0.0")  # reached, and no loopback address
    relayed = server.relayed = CacheJournal()

    def report(block: int) -> None:
        event = BlockStored(VLLM_HASHES, (block,), None, pack_ids([block] * 16), 16, "GPU", 0)
        relayed.add_reported(event, 1)

    async def scenario(cluster: Cluster) -> None:
        async def until_cached(token: int, num_tokens: int) -> None:
            async def is_cached() -> bool:
                body = {"model": "demo", "prompt": [token] * 40}
                async with cluster.post(body, "/debug/route") as response:
                    return (await response.json())["cached_tokens"].get("vllm-d", 0) == num_tokens

            await until_true(is_cached)

        async def is_asked(token: int) -> object:
            body = {"model": "demo", "prompt": [token] * 40, "max_tokens": 3}
            async with cluster.post(body) as response:
                assert response.status == 200
            return server.visits[-1].body.get("vllm_xargs")

        report(7)
        await until_cached(7, 16)
        assert await is_asked(1) is None
        relayed.clear(is_incomplete=True)
        report(8)
        await until_cached(8, 16)
        await until_cached(7, 0)
        assert await is_asked(2) == {"kv_cache_report_mode": "full"}
        relayed.clear()
        await until_cached(8, 0)
        assert await is_asked(3) is None
        report(9)
        await until_held(cluster, 1)
        events = (await shown(cluster))["kv_events"]
        assert events["endpoint"] == KV_EVENTS_PREFIX
        assert (events["problem"], events["feed"]["num_lost"]) == (None, 1)
        assert await cluster.metric(NOT_FOLLOWED) == 0
        assert following_threads() == []

    options = {"policy": "prefix", "tokenizers": {"demo": DEMO_MODEL_PATH}}
    run(scenario, prefills=0, decodes=[server], probe_interval_s=0.02, **options)


@pytest.mark.parametrize("options", [{"policy": "prefix"}, {}])
def test_a_server_that_passes_its_events_on_is_subscribed_to_on_its_own_host(
    ends, give_birth, options
):
    publisher = give_birth(*ends)
    server = server_of(publisher.source)
    server.extra_info |= {"relays_kv_events": True}

    async def scenario(cluster: Cluster) -> None:
        await until_connected(cluster)
        publisher.publish(stored(5))
        await until_held(cluster, 1)

    run(scenario, prefills=0, decodes=[server], probe_interval_s=0.02, **options)


def test_what_was_published_before_and_what_was_lost_is_asked_for(ends, give_birth):
    publisher = give_birth(*ends)
    for block in range(1_000):
        publisher.publish(stored(block))

    async def scenario(cluster: Cluster, _server: ScriptedVllm):
        await until_held(cluster, 1_000)
        publisher.publish(stored(1_000), is_lost=True)
        publisher.publish(stored(1_001))
        await until_held(cluster, 1_002)
        by_worker = '{worker="vllm-d"}'
        assert await cluster.metric("baton_kv_event_lost_total" + by_worker) == 0
        assert await cluster.metric("baton_kv_event_replays_total" + by_worker) >= 1

    run_with(publisher.source, scenario)


def test_the_holdings_of_a_life_end_with_it(ends, give_birth):
    old = give_birth(*ends)

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_connected(cluster)
        old.publish(stored(1, 2, 3))
        await until_held(cluster, 3)
        old.close()
        new = give_birth(*ends)
        new.publish(stored(7))
        server.begin_another_life()
        name = server.name

        async def is_new() -> bool:
            held = f'baton_kv_blocks_held{{group="0",medium="GPU",worker="{name}"}}'
            async with cluster.client.get(cluster.url + "/metrics") as response:
                text = await response.text()
            return f"{held} 1.0" in text and "vllm-d" not in text

        await until_true(is_new)
        assert following_threads() == [f"kv-events-{name}"]

    run_with(old.source, scenario)


def test_another_life_is_followed_even_if_its_publisher_is_not_noticed(ends, give_birth, tmp_path):
    """Another endpoint, and none of its events yet: what the old life held must be gone."""
    old = give_birth(*ends)

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_connected(cluster)
        old.publish(stored(1, 2, 3))
        await until_held(cluster, 3)
        server.epoch = "8" * 32  # of the same name
        server.extra_info["kv_events"] = {**old.source, "endpoint": f"ipc://{tmp_path}/elsewhere"}

        async def moved() -> bool:
            events = (await shown(cluster))["kv_events"]
            return bool(events) and events["endpoint"].endswith("/elsewhere")

        await until_true(moved)
        assert (await shown(cluster))["kv_events"]["blocks"] == []

    run_with(old.source, scenario)


def test_a_worker_that_is_down_keeps_its_holdings(ends, give_birth):
    publisher = give_birth(*ends)

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_connected(cluster)
        publisher.publish(stored(1, 2))
        await until_held(cluster, 2)
        server.health_status = 500

        async def down() -> bool:
            return (await shown(cluster))["state"] == "down"

        await until_true(down)
        await asyncio.sleep(0.3)
        assert await cluster.metric(HELD) == 2
        assert "500" in (await shown(cluster))["reason"]
        server.health_status = 200
        await until_up(cluster, 1)
        publisher.publish(stored(3))
        await until_held(cluster, 3)
        assert await cluster.metric('baton_kv_events_total{type="BlockStored"') == 2

    run_with(publisher.source, scenario)


def test_a_rejected_worker_is_no_longer_followed(ends, give_birth):
    publisher = give_birth(*ends)

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_connected(cluster)
        server.role = "prefill"
        server.begin_another_life()
        await until(lambda: following_threads() == [])
        await until_series_are_gone(cluster)
        worker = await shown(cluster)
        assert (worker["state"], worker["kv_events"]) == ("rejected", None)

    run_with(publisher.source, scenario)


def test_a_publisher_on_every_interface_is_found_at_its_host(give_birth):
    live, replay = find_free_port(), find_free_port()
    publisher = give_birth(f"tcp://*:{live}", f"tcp://*:{replay}")
    publisher.publish(stored(1, 2))

    async def scenario(cluster: Cluster, _server: ScriptedVllm):
        await until_held(cluster, 2)
        assert (await shown(cluster))["kv_events"]["endpoint"] == f"tcp://*:{live}"

    run_with(publisher.source, scenario)


async def until_problem(cluster: Cluster, part: str) -> None:
    """Until the gateway tells why it does not follow the server's events."""

    async def is_told() -> bool:
        events = (await shown(cluster))["kv_events"]
        return events is not None and part in (events["problem"] or "")

    await until_true(is_told)


def test_a_port_that_the_gateway_must_bind_is_waited_for_and_changes_hands(give_birth, caplog):
    live, replay = find_free_port(), find_free_port()
    publisher = give_birth(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")
    publisher.publish(stored(1))
    holder = socket.create_server(("127.0.0.1", live))

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_problem(cluster, str(live))
        await asyncio.sleep(1.2)  # a second attempt, which fails too
        await until_problem(cluster, str(live))
        assert await cluster.metric(NOT_FOLLOWED) == 1
        holder.close()
        await until_held(cluster, 1)
        for life in "789":  # libzmq frees a port some time after its socket was closed
            server.epoch = life * 32
            await until(lambda life=life: server.num_discoveries == int(life) - 5)
            await until_held(cluster, 1)
        assert await cluster.metric(NOT_FOLLOWED) == 1

    with caplog.at_level(logging.WARNING):
        run_with(publisher.source, scenario)
    assert caplog.text.count("are not followed") == 1


@pytest.mark.parametrize(
    "source",
    [
        {"endpoint": "tcp://10.0.0.5:5557"},
        {"endpoint": "inproc://x"},
        {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://10.0.0.5:5558"},
    ],
)
def test_an_endpoint_that_is_not_believed_is_told_once_in_each_life(source, caplog):
    async def scenario(cluster: Cluster, server: ScriptedVllm):
        told = repr(list(source.values())[-1])
        await until_problem(cluster, told)
        num_reads = server.controls[0].num_info_reads
        await until(lambda: server.controls[0].num_info_reads >= num_reads + 2)
        worker = await shown(cluster)
        assert worker["state"] == "up"
        assert worker["kv_events"]["blocks"] == []
        assert worker["kv_events"]["feed"] is None
        assert told in worker["kv_events"]["problem"]
        assert await cluster.metric(NOT_FOLLOWED) == 1
        assert following_threads() == []
        assert caplog.text.count("are not followed") == 1
        server.epoch = "9" * 32

        async def told_again() -> bool:
            return await cluster.metric(NOT_FOLLOWED) == 2

        await until_true(told_again)
        async with cluster.post({"model": "demo", "prompt": "x", "max_tokens": 3}) as response:
            assert response.status == 200

    with caplog.at_level(logging.WARNING):
        run_with(source, scenario)
    assert caplog.text.count("are not followed") == 2


def test_a_server_without_events_is_shown_without():
    async def scenario(cluster: Cluster, _server: ScriptedVllm):
        await asyncio.sleep(0.3)
        assert (await shown(cluster))["kv_events"] is None
        assert following_threads() == []

    run_with(None, scenario)


def test_only_vllms_events_are_understood(ends, give_birth):
    """A Baton worker's hashes would mean something else."""
    source = give_birth(*ends).source

    async def scenario(cluster: Cluster):
        cluster.decodes[0].extra_info["kv_events"] = source
        await until(lambda: cluster.decodes[0].num_info_reads >= 3)
        await asyncio.sleep(0.3)
        assert (await shown(cluster))["kv_events"] is None
        assert following_threads() == []

    run(scenario, prefills=0, probe_interval_s=0.02)


WITHOUT_VLLM = """
import asyncio, sys
from tests.integration.gateway_cluster import run
async def scenario(cluster):
    await asyncio.sleep(0.5)
    assert (await cluster.get_json("/debug/workers"))[0] == 200
    assert "zmq" not in sys.modules, "zmq was imported"
run(scenario)
"""


def test_a_gateway_without_vllm_workers_never_imports_zmq():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_follows_drains_and_leaves(ends, give_birth):
    publisher = give_birth(*ends)
    wait_until_loaded()

    async def main() -> None:
        server = server_of(publisher.source, role="both")
        async with (
            asyncio.timeout(30),
            aiohttp.ClientSession() as client,
            server.running(),
            gateway_process(server) as gateway,
        ):
            cluster = Cluster(gateway.url, client, [], [server])
            await until_connected(cluster)
            publisher.publish(stored(1))
            await until_held(cluster, 1)
            began = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            assert await gateway.process.wait() == 0
            assert time.monotonic() - began < LEAVES_WITHIN_S

    asyncio.run(main())
