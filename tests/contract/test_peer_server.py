"""A `host` tier that listens: whom it answers, and what a peer that misbehaves costs it."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from baton.errors import ConfigError, StoreFullError
from baton.net.tls import ClusterTls
from baton.store.entry_format import HEADER_BYTES, make_header
from baton.store.interface import PeerAccess, PutResult
from baton.store.peer import client as client_module
from baton.store.peer import server as server_module
from baton.store.peer.addresses import find_listen_hosts
from baton.store.peer.client import PeerClient
from baton.store.peer.wire import PutEntry, ReadEntry, ReportStatus, SendValue
from baton.store.remote.client import RequestRefusedError
from baton.store.tiered import open_store
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import (
    BODY_BYTES,
    CONTRACT_KEY,
    body_of,
    name_of,
    put,
    read,
)
from tests.contract.server_faults import (
    TIMEOUT_S,
    wait_until,
)
from tests.peer_server import access
from tests.store_peers import (
    CREDENTIALS,
    PATIENT_S,
    connect,
    hosts,
    open_host,
    open_peers,
    url_of,
)


def test_an_entry_made_without_the_clusters_key_is_not_taken() -> None:
    with hosts(1) as [host]:
        client = PeerClient(url_of(host), access(), PATIENT_S)
        body = body_of("a")
        with pytest.raises(RequestRefusedError, match="cluster key"):
            client.put(name_of("a").hex(), make_header(bytes(32), name_of("a"), body) + body)
        assert host.entries() == []
        value = make_header(CONTRACT_KEY, name_of("a"), body) + body
        with pytest.raises(RequestRefusedError):
            client.put(name_of("b").hex(), value)
        compressed = make_header(CONTRACT_KEY, name_of("c"), body, whole_bytes=2 * len(body)) + body
        with pytest.raises(RequestRefusedError):  # a tier's own form, which no other reads
            client.put(name_of("c").hex(), compressed)
        assert client.put(name_of("a").hex(), value)
        client.disconnect()
        assert read(host, "a") == body


def test_who_proves_nothing_is_not_answered() -> None:
    with hosts(1) as [host]:
        put(host, "a")
        assert host.address is not None
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 5000):
            with socket.create_connection(host.address, PATIENT_S) as sock:
                sock.settimeout(PATIENT_S)
                with suppress(ConnectionError):
                    sock.sendall(garbage)
                    assert sock.recv(1) == b""
        with closing(open_peers(url_of(host))) as tier:
            assert read(tier, "a") == body_of("a")


@pytest.mark.parametrize(
    ("kinds", "listen", "hosts"),
    [
        (("host", "peer"), "0.0.0.0:8010", ("0.0.0.0",)),
        (("host",), "[::1]:0", ("::1",)),
        (("peer",), "0.0.0.0:8010", ()),
        (("host",), None, ()),
    ],
)
def test_hosts_at_which_a_store_listens(
    kinds: tuple[str, ...], listen: str | None, hosts: tuple[str, ...]
) -> None:
    options = {} if listen is None else {"host": {"listen": listen}}
    assert find_listen_hosts(kinds, options) == hosts


@pytest.mark.parametrize("is_first", [True, False])
def test_where_one_side_has_no_tls_nothing_is_sent(is_first: bool) -> None:
    tls = PeerAccess(CREDENTIALS, ClusterTls(CREDENTIALS), serves=True)
    plain = PeerAccess(CREDENTIALS, serves=True)
    with closing(open_host(access=tls if is_first else plain)) as host:
        put(host, "a")
        with closing(
            open_peers(url_of(host), access=plain if is_first else tls, timeout_s=TIMEOUT_S)
        ) as tier:
            assert read(tier, "a") is None
            assert not tier.usage().server.is_available


def test_entries_over_tls() -> None:
    tls = PeerAccess(CREDENTIALS, ClusterTls(CREDENTIALS), serves=True)
    size = 3 << 20
    with (
        closing(open_host(access=tls)) as host,
        closing(open_peers(url_of(host), access=tls)) as tier,
    ):
        assert tier.put(name_of("a"), body_of("a", size)) is PutResult.STORED
        assert read(tier, "a") == body_of("a", size)
        assert host.usage().peers.written_bytes >= size


def test_a_writer_that_stalls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_S", 0.1)
    with hosts(1) as [host]:
        server = host._server
        with closing(connect(host)) as stalled:
            stalled._send_body(PutEntry(name_of("a"), 1 << 20))
            assert isinstance(stalled._receive_answer(), SendValue)
            stalled._send(bytes(1000))
            wait_until(lambda: server.received_bytes == 1 << 20)
            wait_until(lambda: server.received_bytes == 0)
            with pytest.raises(OSError, match=r"closed|reset"):
                stalled._receive_answer()
        assert host.entries() == []


def test_a_reader_that_stalls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_S", 0.1)
    with hosts(1) as [host]:
        host.put(name_of("a"), bytes(64 << 20))
        listener_fds = count_fds()
        with closing(connect(host)) as stalled:
            stalled._send_body(ReadEntry(name_of("a"), 1 << 30))
            wait_until(lambda: count_fds() == listener_fds + 2)
            wait_until(lambda: count_fds() == listener_fds + 1)
        assert host.usage().peers.num_read == 0


def test_a_request_before_the_last_answer_was_taken_ends_the_connection() -> None:
    with hosts(1) as [host]:
        host.put(name_of("a"), bytes(64 << 20))
        with closing(connect(host)) as eager:
            eager._send_body(ReadEntry(name_of("a"), 1 << 30))
            eager._send_body(ReportStatus())
            with pytest.raises(OSError, match=r"closed|reset"):
                eager._receive_into(memoryview(bytearray(65 << 20)))


def test_values_on_their_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_RECEIVED_BYTES", 1 << 20)
    with hosts(1, capacity_bytes=8 << 20) as [host], ExitStack() as stack:
        one, two = (stack.enter_context(closing(connect(host))) for _ in range(2))
        one._send_body(PutEntry(name_of("a"), 4 << 20))  # one alone may be larger
        assert isinstance(one._receive_answer(), SendValue)
        with pytest.raises(StoreFullError, match="on their way"):
            two.put(PutEntry(name_of("b"), 1 << 20), b"")
        with pytest.raises(StoreFullError, match="fit"):
            two.put(PutEntry(name_of("b"), 9 << 20), b"")


def test_its_owner_and_peers_use_one_memory_at_once() -> None:
    """Entries come and go meanwhile: each read is right, or a miss."""
    stop = threading.Event()
    with hosts(1, capacity_bytes=20 * BODY_BYTES) as [host]:
        num_right = [0] * 3

        def read_some(seed: int) -> None:
            chance = random.Random(seed)
            with closing(open_peers(url_of(host))) as tier:
                while not stop.is_set():
                    content = f"entry {chance.randrange(40)}"
                    found = read(tier, content)
                    assert found in {None, body_of(content)}
                    num_right[seed] += found is not None
                    if seed == 0 and found is None:
                        tier._forget(name_of(content))
                        put(tier, content)
                assert tier.usage().num_damaged == 0

        failures: list[Exception] = []

        def run(seed: int) -> None:
            try:
                read_some(seed)
            except Exception as exc:  # noqa: BLE001 - the test shows it
                failures.append(exc)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        chance = random.Random(9)
        deadline, soon = time.monotonic() + 60, time.monotonic() + 0.3
        while time.monotonic() < soon or min(num_right) <= 10:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
            put(host, f"entry {chance.randrange(40)}")
            if chance.random() < 0.1:
                host.discard(name_of(f"entry {chance.randrange(40)}"))
            assert host.usage().used_bytes <= 20 * BODY_BYTES
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert host.usage().used_bytes == sum(entry.num_bytes for entry in host.entries())


def test_an_address_that_is_taken_is_reported() -> None:
    with hosts(1) as [host]:
        assert host.address is not None
        with pytest.raises(ConfigError, match="an address of its own"):
            open_host(listen=f"127.0.0.1:{host.address[1]}")


def test_peers_write_into_no_tiers_below() -> None:
    options = {"host": {"listen": "127.0.0.1:0", "peers_may": "write"}, "shared": {}}
    with pytest.raises(ConfigError, match="host alone"):
        open_store(
            ("host", "peer"),
            {"host": options["host"], "peer": {"urls": ["tcp://127.0.0.1:1"]}},
            cluster="c",
            key=CONTRACT_KEY,
            clock=ManualClock(),
            peers=access(serves=True),
        )


def test_a_reader_without_memory_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(num_bytes: int) -> bytearray:
        if num_bytes >= BODY_BYTES:
            raise MemoryError
        return bytearray(num_bytes)

    with hosts(1) as [host]:
        put(host, "a")
        client = PeerClient(url_of(host), access(), PATIENT_S)
        client.report()
        num_fds = count_fds()
        with monkeypatch.context() as patched:
            patched.setattr(client_module, "bytearray", allocate, raising=False)
            with pytest.raises(MemoryError):
                client.use(name_of("a").hex(), 1 << 20)
        wait_until(lambda: count_fds() == num_fds - 2)  # both ends
        value = client.use(name_of("a").hex(), 1 << 20)
        assert value is not None
        assert value[HEADER_BYTES:] == body_of("a")
        client.disconnect()


def count_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
