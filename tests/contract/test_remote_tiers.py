"""Tiers on real servers: the contract of a tier, and what happens when a server fails."""

from __future__ import annotations

import random
import socket
import socketserver
import threading
import time
from abc import abstractmethod
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis

from baton.errors import ConfigError, StoreError, StoreFullError
from baton.store.entry_format import HEADER_BYTES, make_header
from baton.store.interface import TIERS, PutResult, TierContext
from baton.store.remote.circuit_breaker import MIN_BACKOFF_S
from baton.store.tiered import TieredStore, open_store
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import (
    BODY_BYTES,
    CONTRACT_KEY,
    SharedTierContract,
    body_of,
    name_of,
    put,
    read,
    scan,
)
from tests.contract.certificates import make_authority, make_certificate
from tests.store_servers import S3_CREDENTIALS, RedisServer, S3Server, find_free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.store.interface import Tier
    from baton.store.remote.tier import RemoteTier

TIMEOUT_S = 0.5
"""Where a server fails on purpose; elsewhere the machine may be as busy as it likes."""
PATIENT_S = 10.0
SLACK_S = 0.8
QUICK_S = 0.1
"""Of requests that are not sent."""


class QuickServer(socketserver.ThreadingTCPServer):
    """Its end waits for no connection."""

    daemon_threads = True
    block_on_close = False


class ServerFaultContract(SharedTierContract):
    """A subclass starts the server, and reads and writes values beside the tier."""

    kind: str
    server: Any

    @abstractmethod
    def options(self) -> dict[str, object]:
        """Of the tier."""

    @abstractmethod
    def raw_get(self, path: str) -> bytes | None:
        """A value as the server has it. `path`: cluster and content."""

    @abstractmethod
    def raw_put(self, path: str, value: bytes) -> None:
        """Replace a value on the server."""

    @pytest.fixture(autouse=True)
    def _use_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in S3_CREDENTIALS.items():
            monkeypatch.setenv(name, value)

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        del capacity_bytes  # the server's own
        return self.open_remote(place)

    def open_remote(self, place: Path, clock: ManualClock | None = None, **changed) -> RemoteTier:
        options = self.options() | {"timeout_s": PATIENT_S} | changed
        context = TierContext(place.name, CONTRACT_KEY, clock or ManualClock())
        return TIERS.build(self.kind, options)(context)  # type: ignore[return-value]

    def path(self, place: Path, content: str) -> str:
        return f"{place.name}/{name_of(content).hex()}"

    def test_what_is_kept_outlives_its_users(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
        with self.opened(tmp_path) as tier:
            assert read(tier, "a") == body_of("a")

    def test_a_flipped_bit_anywhere_is_a_miss(self, tmp_path: Path) -> None:
        chance = random.Random(5)
        places = [*range(0, HEADER_BYTES, 5), *chance.sample(range(HEADER_BYTES, BODY_BYTES), 5)]
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            path = self.path(tmp_path, "a")
            right = self.raw_get(path)
            assert right is not None
            for at in places:
                value = bytearray(right)
                value[at] ^= 1 << chance.randrange(8)
                self.raw_put(path, bytes(value))
                assert read(tier, "a") is None
                assert self.raw_get(path) is None, "a damaged entry is removed"
            assert scan(tier).num_damaged == len(places)
            assert put(tier, "a") is PutResult.STORED
            assert read(tier, "a") == body_of("a")

    def test_a_value_cut_short_or_grown_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            path = self.path(tmp_path, "a")
            right = self.raw_get(path)
            assert right is not None
            for wrong in (right[:0], right[:10], right[:HEADER_BYTES], right[:-1], right + b"x"):
                self.raw_put(path, wrong)
                assert read(tier, "a") is None
                assert not tier.is_whole(name_of("a"))
            assert scan(tier).num_damaged == 5

    def test_a_value_larger_than_any_entry_is_not_fetched_whole(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path, max_entry_bytes=BODY_BYTES)) as tier:
            with pytest.raises(StoreFullError, match="max_entry_bytes"):
                tier.put(name_of("large"), body_of("large", BODY_BYTES + 1))
            self.raw_put(self.path(tmp_path, "a"), bytes(4 << 20))
            read_value = tier._client.read(name_of("a").hex(), 1000)
            assert read_value is not None
            assert len(read_value) <= 1000
            assert read(tier, "a") is None
            assert scan(tier).num_damaged == 1

    def test_bytes_of_another_are_a_miss(self, tmp_path: Path) -> None:
        """Another entry of this cluster, and one made without the key."""
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            put(tier, "b")
            other = self.raw_get(self.path(tmp_path, "b"))
            assert other is not None
            self.raw_put(self.path(tmp_path, "a"), other)
            assert read(tier, "a") is None
            forged = body_of("c")
            header = make_header(bytes(32), name_of("a"), forged)
            self.raw_put(self.path(tmp_path, "a"), header + forged)
            assert read(tier, "a") is None
            assert scan(tier).num_damaged == 2
            assert read(tier, "b") == body_of("b")

    def test_two_clusters_on_one_server_do_not_meet(self, tmp_path: Path) -> None:
        other_place = tmp_path / "other-cluster"
        with self.opened(tmp_path) as one, self.opened(other_place) as other:
            put(one, "a")
            assert read(other, "a") is None
            assert other.entries() == []
            assert scan(other).num_damaged == 0

    def test_a_server_that_is_killed_costs_one_wait(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock, timeout_s=TIMEOUT_S)) as tier:
            put(tier, "a")
            assert read(tier, "a") == body_of("a")
            self.server.kill()
            try:
                with taking_at_most(TIMEOUT_S + SLACK_S):
                    assert read(tier, "a") is None
                assert tier.usage().server.num_failures == 1
                with taking_at_most(QUICK_S):
                    use_while_down(tier)
            finally:
                self.server.start()
            wait_available(tier, clock)
            put(tier, "b")
            assert read(tier, "b") == body_of("b")

    def test_a_server_that_hangs_costs_one_wait(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock, timeout_s=TIMEOUT_S)) as tier:
            put(tier, "a")
            with self.server.stopped():
                began = time.monotonic()
                with taking_at_most(TIMEOUT_S + SLACK_S):
                    assert tier.find([name_of("a")]) == 0
                assert time.monotonic() - began > 0.9 * TIMEOUT_S, "it did not hang"
                with taking_at_most(QUICK_S):
                    use_while_down(tier)
                for _ in range(3):  # trials of a server that hangs are waited for by no caller
                    clock.advance(100.0)
                    with taking_at_most(QUICK_S):
                        use_while_down(tier)
            wait_available(tier, clock)
            assert read(tier, "a") == body_of("a")

    def test_a_server_that_is_down_at_the_start_is_used_later(self, tmp_path: Path) -> None:
        clock = ManualClock()
        self.server.kill()
        try:
            tier = self.open_remote(tmp_path, clock)
            assert read(tier, "a") is None
            with pytest.raises(StoreError):
                tier.entries()
        finally:
            self.server.start()
        with closing(tier):
            wait_available(tier, clock)
            assert put(tier, "a") is PutResult.STORED

    def test_a_lower_tier_that_hangs_delays_no_put(self, tmp_path: Path) -> None:
        """Entries that `shared` demotes, and that `host` writes through, do not wait for it."""
        for kind, options in (("shared", {"directory": str(tmp_path)}), ("host", {})):
            upper = options | {"capacity_bytes": 60_000}
            with (
                closing(self.open_store(tmp_path, kind, upper, TIMEOUT_S)) as s,
                self.server.stopped(),
                taking_at_most(TIMEOUT_S + SLACK_S),
            ):
                for i in range(60):
                    put(s, f"{kind} {i}")
                    assert read(s, f"{kind} {i}") == body_of(f"{kind} {i}")
                    s.find([name_of(f"{kind} {n}") for n in range(60)])

    def test_entries_go_down_and_come_up_again(self, tmp_path: Path) -> None:
        for kind, options in (("shared", {"directory": str(tmp_path)}), ("host", {})):
            upper = options | {"capacity_bytes": 60_000}
            with closing(self.open_store(tmp_path, kind, upper)) as s:
                for i in range(12):
                    put(s, f"{kind} {i}")
                wait_until(lambda s=s: s.tiers[1].inner._behind.wait_empty(1.0))
                first, lower = s.tiers
                assert first.find([name_of(f"{kind} 0")]) == 0
                assert lower.find([name_of(f"{kind} 0")]) == 1
                names = [name_of(f"{kind} {i}") for i in range(12)]
                assert s.find(names) == 12
                assert [read(s, f"{kind} {i}") for i in range(12)] == [
                    body_of(f"{kind} {i}") for i in range(12)
                ]
                assert first.find([name_of(f"{kind} 11")]) == 1
                assert first.usage().num_damaged == lower.usage().num_damaged == 0

    def open_store(
        self, place: Path, kind: str, upper: dict[str, object], timeout_s: float = PATIENT_S
    ) -> TieredStore:
        lower = self.options() | {"timeout_s": timeout_s}
        options = {kind: upper, self.kind: lower}
        clock = ManualClock()
        kinds = (kind, self.kind)
        return open_store(kinds, options, cluster=place.name, key=CONTRACT_KEY, clock=clock)

    def test_names_in_two_tiers_are_found_with_one_question(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path, "host", {})) as store:
            upper, lower = store.tiers
            names = [name_of(f"entry {i}") for i in range(100)]
            for i, name in enumerate(names[:90]):
                if i % 3:
                    upper.inner._entries[name] = None  # found, not read
                else:
                    put(lower, f"entry {i}")
            if self.kind == "object":  # it stops some time after its first miss
                for i, _ in enumerate(names[:90]):
                    put(lower, f"entry {i}")
            asked = count_calls(lower.inner._client, "exists")
            assert store.find(names) == 90
            assert asked == [100]
            upper.inner._entries.clear()

    def test_a_prefix_is_fetched_ahead(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path)) as tier:
            contents = [f"entry {i}" for i in range(8)]
            for content in contents:
                put(tier, content)
            assert tier.find([name_of(content) for content in contents]) == 8
            asked = count_calls(tier._client, "use")
            assert [read(tier, content) for content in contents[:4]] == [
                body_of(content) for content in contents[:4]
            ]
            wait_until(lambda: len(asked) > 4)
            tier.discard(name_of(contents[5]))
            assert read(tier, contents[5]) is None
            assert read(tier, contents[6]) == body_of(contents[6])


def use_while_down(tier: RemoteTier) -> None:
    """Everything that may be asked of a tier whose server is down: nothing waits or is wrong."""
    for _ in range(20):
        assert read(tier, "a") is None
        assert tier.find([name_of("a")]) == 0
        with pytest.raises(StoreError):
            tier.is_whole(name_of("a"))
        tier.discard(name_of("z"))
        tier.usage()
        with pytest.raises(StoreError):
            put(tier, "b")
        with pytest.raises(StoreError):
            tier.put_behind(name_of("b"), body_of("b"))
    assert not tier.usage().server.is_available


def wait_available(tier: RemoteTier, clock: ManualClock) -> None:
    """Let the back-off pass; a trial that runs beside the caller ends it."""
    assert not tier.usage().server.is_available

    def is_available() -> bool:
        clock.advance(MIN_BACKOFF_S)
        tier.find([name_of("nothing")])
        return tier.usage().server.is_available

    wait_until(is_available)


def wait_until(is_true: Any, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def resolved_here(monkeypatch: Any, host: str) -> Iterator[None]:
    """A name in a certificate, for a server on this machine."""
    resolve = socket.getaddrinfo

    def resolve_here(asked: Any, *rest: Any, **named: Any) -> Any:
        return resolve("127.0.0.1" if asked == host else asked, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve_here)
        yield


@contextmanager
def taking_at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def count_sets(client: redis.Redis) -> int:
    """Entries that the server was sent."""
    counts = client.info("commandstats")["cmdstat_set"]
    return counts["calls"] + counts["rejected_calls"]


def count_calls(client: Any, method: str) -> list[int]:
    """Sizes of the first arguments of calls from now on."""
    inner, sizes = getattr(client, method), []

    def counted(first: Any, *rest: Any) -> Any:
        sizes.append(len(first))
        return inner(first, *rest)

    setattr(client, method, counted)
    return sizes


class TestRedisTier(ServerFaultContract):
    kind = "redis"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield
        cls.server.close()

    def options(self) -> dict[str, object]:
        return {"url": self.server.url}

    @contextmanager
    def raw(self) -> Iterator[redis.Redis]:
        with redis.Redis(port=self.server.port, protocol=2) as client:
            yield client

    def raw_get(self, path: str) -> bytes | None:
        with self.raw() as client:
            return client.get(f"baton:{path.replace('/', ':')}")

    def raw_put(self, path: str, value: bytes) -> None:
        with self.raw() as client:
            client.set(f"baton:{path.replace('/', ':')}", value)

    def test_a_server_without_room_is_full_and_still_read(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock)) as tier, self.raw() as client:
            put(tier, "a")
            client.config_set("maxmemory", client.info("memory")["used_memory"])
            try:
                assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
                with pytest.raises(StoreFullError):
                    put(tier, "b")
                assert tier.usage().server.is_available
                num_sets = count_sets(client)
                for _ in range(10):
                    with pytest.raises(StoreFullError):
                        put(tier, "b")
                    with pytest.raises(StoreError):
                        tier.put_behind(name_of("b"), body_of("b"))
                assert count_sets(client) == num_sets
                assert read(tier, "a") == body_of("a")
                clock.advance(MIN_BACKOFF_S)
                with pytest.raises(StoreFullError):
                    put(tier, "b")
                assert count_sets(client) > num_sets
            finally:
                client.config_set("maxmemory", 0)
            clock.advance(10 * MIN_BACKOFF_S)
            assert put(tier, "b") is PutResult.STORED

    def test_the_server_evicts_by_its_own_policy(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path)) as tier, self.raw() as client:
            room = client.info("memory")["used_memory"] + 40 * BODY_BYTES
            client.config_set("maxmemory", room)
            client.config_set("maxmemory-policy", "volatile-lru")  # entries expire, so they count
            try:
                for i in range(200):
                    assert put(tier, f"entry {i}") is PutResult.STORED
                assert 0 < scan(tier).num_entries < 100
                assert read(tier, "entry 199") == body_of("entry 199")
            finally:
                client.config_set("maxmemory", 0)
                client.config_set("maxmemory-policy", "noeviction")

    def test_an_entry_that_is_not_used_expires(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path, ttl_s=100.0)) as tier, self.raw() as client:
            put(tier, "a")
            key = f"baton:{self.path(tmp_path, 'a').replace('/', ':')}"
            assert 90_000 < client.pttl(key) <= 100_000
            client.pexpire(key, 5000)
            [entry] = tier.entries()
            now = ManualClock().unix_now()
            assert now - 96 < entry.used_at < now - 94
            assert tier.is_whole(name_of("a"))
            assert client.pttl(key) <= 5000, "a check is no use"
            assert read(tier, "a") == body_of("a")
            assert client.pttl(key) > 90_000
            client.pexpire(key, 1)
            wait_until(lambda: client.get(key) is None)
            assert read(tier, "a") is None
            assert tier.usage().num_damaged == 0

    def test_a_server_that_refuses_one_command_is_left_alone(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock)) as tier, self.raw() as client:
            put(tier, "a")
            client.acl_setuser("default", enabled=True, nopass=True, commands=["-set"])
            try:
                with pytest.raises(StoreError, match="permission"):
                    put(tier, "b")
                assert read(tier, "a") == body_of("a")
                assert tier.usage().server.is_available
                client.acl_setuser("default", enabled=True, nopass=True, commands=["-getrange"])
                assert read(tier, "a") is None
                assert not tier.usage().server.is_available
            finally:
                client.acl_setuser("default", enabled=True, nopass=True, categories=["+@all"])
            wait_available(tier, clock)
            assert read(tier, "a") == body_of("a")

    def test_with_a_password_over_tls(self, tmp_path: Path, monkeypatch: Any) -> None:
        make_authority(tmp_path, "authority")
        files = make_certificate(tmp_path, "client", authority="authority")
        names = {"--tls-cert-file": files["certificate"], "--tls-key-file": files["key"]}
        tls = [text for pair in names.items() for text in pair]
        tls += ["--tls-ca-cert-file", files["ca"], "--requirepass", "secret of this test"]
        port = find_free_port()
        server = RedisServer(tmp_path, "--port", "0", "--tls-port", str(port), *tls, port=port)
        try:
            options = {
                "url": f"rediss://worker:{port}/0",
                "ca_file": files["ca"],
                "certificate_file": files["certificate"],
                "key_file": files["key"],
            }
            with resolved_here(monkeypatch, "worker"):
                with pytest.raises(ConfigError, match=r"(?i)auth"):
                    self.open_remote(tmp_path, **options)
                password = tmp_path / "password"
                password.write_text("secret of this test\n")
                password.chmod(0o600)
                with closing(
                    self.open_remote(tmp_path, **options, password_file=str(password))
                ) as tier:
                    put(tier, "a")
                    assert read(tier, "a") == body_of("a")
                make_authority(tmp_path, "another")
                options["ca_file"] = str(tmp_path / "another.pem")
                with closing(self.open_remote(tmp_path, **options)) as tier:
                    assert not tier.usage().server.is_available
        finally:
            server.close()

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"url": "redis://:secret@127.0.0.1/0"}, "password_file"),
            ({"url": "redis://127.0.0.1/0?password=secret"}, "password_file"),
            ({"url": "http://127.0.0.1/"}, "redis://HOST"),
            ({"url": "redis://127.0.0.1:port/"}, "redis://HOST"),
            ({"url": "redis://127.0.0.1/zero"}, "redis://HOST"),
            ({"password_file": "/nowhere"}, "password_file"),
            ({"ttl": 3}, "ttl"),
        ],
    )
    def test_options_that_make_no_sense(
        self, tmp_path: Path, changed: dict[str, object], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            self.open_remote(tmp_path, **changed)
        assert "secret" not in str(caught.value)

    def test_a_password_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        password = tmp_path / "password"
        password.write_text("secret")
        password.chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            self.open_remote(tmp_path, password_file=str(password))

    def test_an_answer_that_trickles_in_is_cut_off(self, tmp_path: Path) -> None:
        """Each read of the socket is in time, the answer is not."""
        num_sent: list[int] = []

        class Trickling(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.recv(1 << 16)
                self.request.sendall(b"$1000000\r\n")
                for _ in range(100):
                    num_sent.append(self.request.send(b"x"))
                    time.sleep(TIMEOUT_S / 10)

        with QuickServer(("127.0.0.1", 0), Trickling) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with taking_at_most(TIMEOUT_S + SLACK_S):
                url = f"redis://127.0.0.1:{server.server_address[1]}"
                tier = self.open_remote(tmp_path, url=url, timeout_s=TIMEOUT_S)
            assert len(num_sent) > 5
            assert not tier.usage().server.is_available
            with taking_at_most(TIMEOUT_S + SLACK_S):
                tier.close()
            server.shutdown()


class TestObjectTier(ServerFaultContract):
    kind = "object"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls) -> Iterator[None]:
        cls.server = S3Server()
        yield
        cls.server.close()

    def options(self) -> dict[str, object]:
        return self.server.options

    def raw_get(self, path: str) -> bytes | None:
        return self.server.request("GET", f"baton/{path}") or None

    def raw_put(self, path: str, value: bytes) -> None:
        self.server.request("PUT", f"baton/{path}", value)

    def test_a_server_that_answers_errors_is_left_alone(self, tmp_path: Path) -> None:
        requests: list[bytes] = []

        class Failing(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                requests.append(self.rfile.readline())
                self.wfile.write(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n")

        with QuickServer(("127.0.0.1", 0), Failing) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            with (
                taking_at_most(TIMEOUT_S + SLACK_S),
                closing(self.open_remote(tmp_path, endpoint=endpoint, timeout_s=TIMEOUT_S)) as tier,
            ):
                num_requests = len(requests)
                assert num_requests > 0
                use_while_down(tier)
                assert len(requests) == num_requests
            server.shutdown()

    def test_credentials_that_are_refused_end_the_start(self, tmp_path: Path) -> None:
        class Refusing(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.rfile.readline()
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")

        with QuickServer(("127.0.0.1", 0), Refusing) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            with pytest.raises(ConfigError, match=r"store\.options\.object"):
                self.open_remote(tmp_path, endpoint=endpoint)
            server.shutdown()

    def test_a_bucket_that_is_not_there_is_a_server_that_fails(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path, url="s3://nowhere/kv")) as tier:
            assert not tier.usage().server.is_available
            with pytest.raises(StoreError):
                tier._client.put(name_of("a").hex(), b"a bucket that was removed meanwhile")

    @pytest.mark.parametrize(
        ("changed", "message"), [({"url": "kv"}, "object"), ({"url": "nfs://kv"}, "object")]
    )
    def test_options_that_make_no_sense(
        self, tmp_path: Path, changed: dict[str, object], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            self.open_remote(tmp_path, **changed)

    def test_a_folder_serves_to_try_it_out(self, tmp_path: Path) -> None:
        options = {"url": f"file://{tmp_path}/bucket"}
        context = TierContext("contract", CONTRACT_KEY, ManualClock())
        with closing(TIERS.build("object", options)(context)) as tier:
            assert put(tier, "a") is PutResult.STORED
            assert put(tier, "a") is PutResult.EXISTS
            assert read(tier, "a") == body_of("a")
            tier.discard(name_of("a"))
            tier.discard(name_of("a"))
            assert tier.entries() == []
