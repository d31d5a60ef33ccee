"""Servers as guests of a machine: what they listen on, what they use, what they publish."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.events.blocks import BlockStored
from baton.events.journal import BATON_HASHES
from baton.events.wire import decode_page
from baton.protocol.worker_http import KV_EVENTS_PREFIX
from tests.e2e_vllm.client import TLS, ask_one, is_idle, make_prompts, read_info, wait_idle
from tests.e2e_vllm.cluster import BLOCK_SIZE, wait_ready
from tests.e2e_vllm.process_stats import (
    find_tree,
    measure_cores,
    read_listening_addresses,
    read_thread_cores,
)
from tests.e2e_vllm.tickets import Handoff, Server, read_tokens
from tests.integration.following_kv_events import Consumer, wait_until
from tests.port_scan import check_refusals, find_listeners

if TYPE_CHECKING:
    from baton.events.blocks import ExternalHash
    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

pytestmark = pytest.mark.vllm

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
IDLE_CORES = 0.05
WAITING_CORES = 0.4


def test_nothing_listens_beyond_loopback(cluster: VllmCluster) -> None:
    for server in (cluster.prefill, cluster.decode, cluster.gateway):
        addresses = read_listening_addresses(server)
        assert addresses
        assert addresses <= LOOPBACK, server.name


def test_no_thread_is_pinned(cluster: VllmCluster) -> None:
    mine = Path("/proc/self/status").read_text("ascii")
    (cores,) = (line.split()[1] for line in mine.splitlines() if "Cpus_allowed_list" in line)
    for server in (cluster.prefill, cluster.decode):
        assert read_thread_cores(server) == {cores}


def test_nothing_is_left_in_shared_memory_files(cluster: VllmCluster) -> None:
    for server in (cluster.prefill, cluster.decode):
        for pid in find_tree(server.pid):
            targets = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
            ours = [target for target in targets if "/dev/shm/baton" in target]
            # The store's folder has a name: others look for it there, and its last user removes it.
            assert not [target for target in ours if "-store" not in target]


def test_sockets_of_a_server_lie_in_the_folder_that_goes_with_it(
    cluster: VllmCluster, cluster_factory: ClusterFactory
) -> None:
    for server in (cluster.prefill, cluster.decode):
        port = server.url.rpartition(":")[2]
        (folder,) = cluster_factory.run_directory.rglob(f"worker-{port}")
        assert [path for path in folder.iterdir() if path.is_socket() and is_uuid(path.name)]


def is_uuid(name: str) -> bool:
    """How vLLM names the sockets between its processes."""
    return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name) is not None


def test_idle_servers_rest(cluster: VllmCluster) -> None:
    wait_idle(cluster.prefill, cluster.decode)
    for server in (cluster.prefill, cluster.decode):
        # A busy machine makes the same work dearer for a while; what spins does so each time.
        assert any(measure_cores(server, 1.0) < IDLE_CORES for _ in range(5)), server.name


def test_a_server_that_waits_for_kv_does_not_spin(cluster: VllmCluster) -> None:
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    (prompt,) = make_prompts(1, seed=11, shortest=500, longest=500)
    expected = ask_one(cluster.oracle, prompt)
    handoff = Handoff.make(prefill, decode, prompt)
    answering = handoff.ask_decode()
    wait_until(lambda: not is_idle(cluster.decode))
    assert any(measure_cores(cluster.decode, 1.0) < WAITING_CORES for _ in range(5))
    assert not answering.done(), "it did not wait"
    decode.give_up(handoff.ticket, "the test is over")
    assert read_tokens(answering.result()) == expected
    trace = handoff.read_decode_trace()
    assert trace.fallbacks == ["computed locally: the test is over"]
    wait_idle(cluster.prefill, cluster.decode)


def follow(server: FleetProcess) -> Consumer:
    source = read_info(server)["kv_events"]
    return Consumer(source["endpoint"], source["replay_endpoint"], source["topic"]).connect()


def until_stored(consumer: Consumer, held: set[int], num_blocks: int) -> set[int]:
    """All that is held once this many blocks more are; others may have gone for them."""
    wait_until(lambda: len(consumer.take() - held) >= num_blocks, lambda: consumer.health)
    return set(consumer.take())


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_kv_events_tell_what_prefix_caching_holds(cluster: VllmCluster, name: str) -> None:
    server = cluster.prefill if name == "prefill" else cluster.decode
    consumer = follow(server)
    try:
        held = set(consumer.take())
        for prompt in make_prompts(4, seed=12 + len(name), shortest=70, longest=700):
            # Decoded through the gateway, a prompt comes to be cached on both sides.
            ask_one(cluster.gateway, prompt, max_tokens=1)
            now = until_stored(consumer, held, len(prompt) // BLOCK_SIZE)
            again = ask_one(server, prompt, max_tokens=1)
            assert len(now - held) * BLOCK_SIZE == again.num_cached
            held = now
        late = follow(server)  # is told what it missed
        try:
            wait_until(lambda: late.take() == held, lambda: late.health)
            assert late.count(BlockStored) > 0
        finally:
            late.close()
    finally:
        consumer.close()


def test_a_server_of_another_host_passes_on_what_prefix_caching_holds(
    cluster_factory: ClusterFactory,
) -> None:
    server = cluster_factory.start("relayed", "both", worker__host="0.0.0.0")
    wait_ready(server)
    assert read_info(server)["relays_kv_events"]
    consumer = follow(server)
    try:
        for prompt in make_prompts(3, seed=15, shortest=70, longest=700):
            ask_one(server, prompt, max_tokens=1)
        wait_until(lambda: read_relayed(server) == consumer.take() != set(), consumer.take)
    finally:
        consumer.close()
    cluster_factory.end(server)


def read_relayed(server: FleetProcess) -> set[ExternalHash]:
    """All that a gateway of another host learns."""
    url = f"{server.url}{KV_EVENTS_PREFIX}{1 << 40}"
    with urllib.request.urlopen(url, timeout=60, context=TLS) as response:
        page = decode_page(response.read(), BATON_HASHES)
    assert page.is_whole
    assert not page.is_incomplete
    return {h for event in page.events if isinstance(event, BlockStored) for h in event.hashes}


def test_strangers_are_refused_at_every_listener(cluster: VllmCluster) -> None:
    listeners = find_listeners(cluster.prefill, cluster.decode)
    # HTTP, control, handoffs and pages of both, and the sockets of `shared`.
    assert len(listeners) >= 10, listeners
    check_refusals(listeners)
