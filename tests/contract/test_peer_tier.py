"""The tier `peer`: one server as a process of its own, and several `host` tiers of this process."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import ConfigError, StoreError, StoreFullError
from baton.net.tls import ClusterTls
from baton.store.entry_format import make_header
from baton.store.interface import TIERS, PeerAccess, PutResult, TierContext
from baton.store.peer import server as server_module
from baton.store.peer.addresses import find_listen_hosts
from baton.store.peer.client import PeerClient, PeerConnection
from baton.store.peer.wire import PutEntry, ReadEntry, ReportStatus, SendValue
from baton.store.remote.client import RequestRefusedError
from baton.store.tiered import open_store
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import (
    BODY_BYTES,
    CONTRACT_KEY,
    SharedTierContract,
    body_of,
    name_of,
    put,
    read,
)
from tests.contract.server_faults import (
    QUICK_S,
    SLACK_S,
    TIMEOUT_S,
    ServerFaultContract,
    taking_at_most,
    wait_available,
    wait_until,
)
from tests.free_ports import find_free_port
from tests.peer_server import PEER_KEY, access
from tests.store_servers import StoreServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.store.interface import Tier
    from baton.store.tiers.host import HostTier

PATIENT_S = 10.0


class PeerServer(StoreServer):
    """A process that keeps values unchecked."""

    def __init__(self) -> None:
        port = find_free_port()
        super().__init__([sys.executable, "-m", "tests.peer_server", str(port)], port)

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


class TestPeerTier(ServerFaultContract):
    kind = "peer"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls) -> Iterator[None]:
        cls.server = PeerServer()
        yield
        cls.server.close()

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        """A peer has one place for all: that of its cluster."""
        with self.raw() as client:
            for value in client.list_values(1 << 20):
                client.delete(value.key)

    def peers(self) -> PeerAccess:
        return access()

    def options(self) -> dict[str, object]:
        return {"urls": [self.server.url], "promote_at_read": 1}

    @contextmanager
    def raw(self) -> Iterator[PeerClient]:
        client = PeerClient(self.server.url, access(), PATIENT_S)
        try:
            yield client
        finally:
            client.disconnect()

    def raw_get(self, path: str) -> bytes | None:
        with self.raw() as client:
            value = client.read(path.rpartition("/")[2], 1 << 30)
            return None if value is None else bytes(value)

    def raw_put(self, path: str, value: bytes) -> None:
        """Values shorter than a header are put as one that is damaged: none are sent."""
        key = path.rpartition("/")[2]
        with self.raw() as client:
            client.delete(key)
            client.put(key, value.ljust(76, b"\0"))

    def test_two_clusters_on_one_server_do_not_meet(self, tmp_path: Path) -> None:
        """A server is of one cluster: it answers no other."""
        with self.opened(tmp_path) as tier:
            put(tier, "a")
        stranger = PeerAccess(Credentials.of(ClusterKey(b"q" * 32)))
        context = TierContext("c", CONTRACT_KEY, ManualClock(), peers=stranger)
        with closing(TIERS.build("peer", self.options())(context)) as other:
            assert read(other, "a") is None
            assert not other.usage().server.is_available

    def test_more_names_than_one_question_has(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "entry 8999")
            found = tier.find_each([name_of(f"entry {i}") for i in range(9000)])
            assert [i for i, is_there in enumerate(found) if is_there] == [8999]

    def test_a_server_that_restarts_is_asked_on_a_new_connection(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            assert tier.find([name_of("a")]) == 0
            self.server.kill()
            self.server.start()
            put(tier, "a")
            assert read(tier, "a") == body_of("a")
            assert tier.usage().server.num_failures == 0


def open_host(
    *, access: PeerAccess | None = None, key: bytes = CONTRACT_KEY, **options: object
) -> HostTier:
    """A `host` tier that listens."""
    context = TierContext(
        "contract", key, MachineClock(), peers=access or PeerAccess(CREDENTIALS, serves=True)
    )
    settings = {"listen": "127.0.0.1:0", "peers_may": "write"} | options
    return TIERS.build("host", settings)(context)  # type: ignore[return-value]


CREDENTIALS = Credentials.of(PEER_KEY)


def url_of(host: HostTier) -> str:
    assert host.address is not None
    return f"tcp://127.0.0.1:{host.address[1]}"


def open_peers(
    *urls: str, access: PeerAccess | None = None, clock: ManualClock | None = None, **options: Any
) -> Any:
    context = TierContext(
        "contract", CONTRACT_KEY, clock or ManualClock(), peers=access or PeerAccess(CREDENTIALS)
    )
    settings = {"urls": list(urls), "timeout_s": PATIENT_S} | options
    return TIERS.build("peer", settings)(context)


@contextmanager
def hosts(count: int, **options: object) -> Iterator[list[HostTier]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(open_host(**options))) for _ in range(count)]


class TestSeveralPeers(SharedTierContract):
    @pytest.fixture(autouse=True)
    def _hosts(self) -> Iterator[None]:
        with hosts(3) as self.hosts:
            yield

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        return open_peers(*map(url_of, self.hosts))

    def test_each_entry_is_kept_by_one_peer_and_a_prefix_is_read_from_all(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as tier, self.opened(tmp_path) as other:
            for i in range(60):
                put(tier, f"entry {i}")
            held = [len(host.entries()) for host in self.hosts]
            assert sum(held) == 60
            assert min(held) > 5
            assert other.find([name_of(f"entry {i}") for i in range(61)]) == 60
            for i in range(60):
                assert read(other, f"entry {i}") == body_of(f"entry {i}")
                assert other.put(name_of(f"entry {i}"), b"x") is PutResult.EXISTS
            assert sum(host.usage().peers.num_read for host in self.hosts) >= 60

    def test_what_a_peer_that_left_kept_is_missing_and_others_take_its_share(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as tier:
            for i in range(30):
                put(tier, f"entry {i}")
            left = {entry.name for entry in self.hosts[0].entries()}
            assert left
            self.hosts[0].close()
            for i in range(30):
                is_left = name_of(f"entry {i}") in left
                assert read(tier, f"entry {i}") == (None if is_left else body_of(f"entry {i}"))
            assert not tier.usage().server.is_available
            for i in range(30, 60):
                assert put(tier, f"entry {i}") is PutResult.STORED
                assert read(tier, f"entry {i}") == body_of(f"entry {i}")


def test_a_peer_that_hangs_costs_one_wait_and_hides_no_other() -> None:
    clock = ManualClock()
    server = PeerServer()
    try:
        with hosts(2) as good:
            urls = [url_of(good[0]), server.url, url_of(good[1])]
            with closing(open_peers(*urls, clock=clock, timeout_s=TIMEOUT_S)) as tier:
                for i, host in enumerate(good * 5):
                    put(host, f"entry {i}")
                names = [name_of(f"entry {i}") for i in range(10)]
                with server.stopped():
                    began = time.monotonic()
                    with taking_at_most(TIMEOUT_S + SLACK_S):
                        assert tier.find(names) == 10
                    assert time.monotonic() - began > 0.9 * TIMEOUT_S, "it did not hang"
                    with taking_at_most(QUICK_S):
                        assert tier.find(names) == 10
                        assert [read(tier, f"entry {i}") for i in range(10)] == [
                            body_of(f"entry {i}") for i in range(10)
                        ]
                wait_available(tier, clock)
    finally:
        server.close()


def test_memory_of_a_worker_is_read_and_not_written() -> None:
    with hosts(1, peers_may="read") as [host], closing(open_peers(url_of(host))) as tier:
        put(host, "a")
        assert read(tier, "a") == body_of("a")
        for keep in (tier.put, tier.put_behind):
            with pytest.raises(StoreFullError):
                keep(name_of("b"), body_of("b"))
        client = PeerClient(url_of(host), access(), PATIENT_S)
        with pytest.raises(StoreFullError, match="takes no entries"):
            client.put(name_of("b").hex(), b"x" * 100)
        client.disconnect()
        assert [entry.name for entry in host.entries()] == [name_of("a")]


def test_workers_read_what_is_in_each_others_memory_and_keep_a_copy() -> None:
    with ExitStack() as stack:
        ports = [find_free_port(), find_free_port()]
        stores = []
        for own, other in (ports, ports[::-1]):
            options = {
                "host": {"listen": f"127.0.0.1:{own}"},
                "peer": {"urls": [f"tcp://127.0.0.1:{other}"]},
            }
            store = open_store(
                ("host", "peer"),
                options,
                cluster="c",
                key=CONTRACT_KEY,
                clock=MachineClock(),
                peers=PeerAccess(CREDENTIALS, serves=True),
            )
            stores.append(stack.enter_context(closing(store)))
        one, two = stores
        time.sleep(1.1)  # the first one's peer was not there when it asked first
        for i in range(10):
            assert put(one, f"entry {i}") is PutResult.STORED
        names = [name_of(f"entry {i}") for i in range(10)]
        assert two.find(names) == 10
        for _ in range(3):
            assert [read(two, f"entry {i}") for i in range(10)] == [
                body_of(f"entry {i}") for i in range(10)
            ]
        assert two.tiers[0].find(names) == 10
        assert 20 <= one.tiers[0].usage().peers.num_read <= 22, "copied at the second read"
        assert two.tiers[0].usage().peers.num_written == 0


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
    monkeypatch.setattr(server_module, "STALL_S", 0.3)
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
    monkeypatch.setattr(server_module, "STALL_S", 0.3)
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
        deadline, soon = time.monotonic() + 10, time.monotonic() + 0.3
        while time.monotonic() < soon or min(num_right) <= 10:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
            put(host, f"entry {chance.randrange(40)}")
            if chance.random() < 0.1:
                host.discard(name_of(f"entry {chance.randrange(40)}"))
            assert host.usage().used_bytes <= 20 * BODY_BYTES
        stop.set()
        for thread in threads:
            thread.join(10)
        assert not failures
        assert host.usage().used_bytes == sum(entry.num_bytes for entry in host.entries())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("peer", {"urls": []}, "urls"),
        ("peer", {"urls": ["http://127.0.0.1:1"]}, "tcp://HOST:PORT"),
        ("peer", {"urls": ["tcp://127.0.0.1"]}, "tcp://HOST:PORT"),
        ("peer", {"urls": ["tcp://user:secret@127.0.0.1:1"]}, "tcp://HOST:PORT"),
        ("peer", {"urls": ["tcp://127.0.0.1:1"] * 2}, "twice"),
        ("host", {"listen": "127.0.0.1"}, "HOST:PORT"),
        ("host", {"listen": "127.0.0.1:70000"}, "HOST:PORT"),
        ("host", {"listen": "127.0.0.1:0", "peers_may": "all"}, "peers_may"),
    ],
)
def test_options_that_make_no_sense(kind: str, options: dict[str, object], message: str) -> None:
    context = TierContext("c", CONTRACT_KEY, ManualClock(), peers=access(serves=True))
    with pytest.raises(ConfigError, match=message):
        TIERS.build(kind, options)(context)


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


def test_a_peer_needs_the_clusters_credentials() -> None:
    with pytest.raises(ConfigError, match="credentials"):
        TIERS.build("peer", {"urls": ["tcp://127.0.0.1:1"]})(
            TierContext("c", CONTRACT_KEY, ManualClock())
        )
    with pytest.raises(StoreError, match="cannot connect"):
        PeerClient(f"tcp://127.0.0.1:{find_free_port()}", access(), 1.0).report()


def connect(host: HostTier) -> PeerConnection:
    assert host.address is not None
    sock = socket.create_connection(host.address, PATIENT_S)
    connection = PeerConnection(sock)
    connection.prove(access())
    return connection


def count_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
