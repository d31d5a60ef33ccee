"""The tier `redis`, on a real server."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import redis

from baton.errors import ConfigError, StoreError, StoreFullError
from baton.store.interface import TIERS, PutResult
from baton.store.remote.circuit_breaker import MIN_BACKOFF_S
from baton.store.remote.client import ReportsServer
from baton.store.remote.tier import REPORT_INTERVAL_S
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import (
    BODY_BYTES,
    body_of,
    name_of,
    put,
    read,
    scan,
)
from tests.contract.certificates import make_authority, make_certificate
from tests.contract.server_faults import (
    PATIENT_S,
    SLACK_S,
    TIMEOUT_S,
    QuickServer,
    ServerFaultContract,
    taking_at_most,
    wait_available,
    wait_until,
)
from tests.free_ports import find_free_port
from tests.store_servers import RedisServer, forwarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from baton.store.remote.tier import RemoteTier


@contextmanager
def resolved_here(monkeypatch: Any, host: str) -> Iterator[None]:
    """A name in a certificate, for a server on this machine."""
    resolve = socket.getaddrinfo

    def resolve_here(asked: Any, *rest: Any, **named: Any) -> Any:
        return resolve("127.0.0.1" if asked == host else asked, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve_here)
        yield


def count_sets(client: redis.Redis) -> int:
    """Entries that the server was sent."""
    counts = client.info("commandstats")["cmdstat_set"]
    return counts["calls"] + counts["rejected_calls"]


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

    def test_a_server_that_has_taken_entries_again_is_not_left_alone_for_longer(
        self, tmp_path: Path
    ) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock)) as tier, self.raw() as client:
            numbers = count()

            def is_taken() -> bool:
                content = f"entry {next(numbers)}"
                try:
                    tier.put_behind(name_of(content), body_of(content))
                except StoreError:
                    return False
                return tier._behind.wait_empty(PATIENT_S)

            try:
                for _ in range(3):
                    client.config_set("maxmemory", client.info("memory")["used_memory"])
                    assert is_taken()  # into the queue; the server refuses it
                    assert not is_taken()
                    client.config_set("maxmemory", 0)
                    clock.advance(MIN_BACKOFF_S)
                    assert is_taken()
            finally:
                client.config_set("maxmemory", 0)

    def test_the_server_evicts_by_its_own_policy(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path)) as tier, self.raw() as client:
            room = client.info("memory")["used_memory"] + 40 * BODY_BYTES
            client.config_set("maxmemory", room)
            client.config_set("maxmemory-policy", "volatile-lru")  # entries expire, so they count
            try:
                for i in range(200):
                    assert put(tier, f"entry {i}") is PutResult.STORED
                assert 0 < scan(tier).num_entries < 200
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

    def test_a_key_of_another_type_is_a_damaged_entry(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier, self.raw() as client:
            key = f"baton:{self.path(tmp_path, 'a').replace('/', ':')}"
            client.rpush(key, b"an element of a list")
            assert not tier.is_whole(name_of("a"))
            assert read(tier, "a") is None
            assert tier.usage().num_damaged == 1
            assert client.exists(key) == 0
            assert put(tier, "a") is PutResult.STORED

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

    @pytest.mark.parametrize("ask", [read, put])
    def test_after_a_failover_the_new_master_is_used(
        self, tmp_path: Path, ask: Callable[[RemoteTier, str], object]
    ) -> None:
        """The address leads to another server, and connections to the old one go on."""
        clock, ports = ManualClock(), [self.server.port]
        other = RedisServer(tmp_path)
        with closing(other), forwarded(ports) as port, self.raw() as client:
            url = f"redis://127.0.0.1:{port}/0"
            with closing(self.open_remote(tmp_path, clock, url=url)) as tier:
                put(tier, "a")
                client.replicaof("127.0.0.1", other.port)
                try:
                    with suppress(StoreError):
                        assert ask(tier, "b" if ask is put else "a") is None
                    assert not tier.usage().server.is_available
                    with pytest.raises(StoreError, match="replica"):
                        tier._client.report()
                    ports.append(other.port)
                    wait_available(tier, clock)
                    assert put(tier, "c") is PutResult.STORED
                    assert read(tier, "c") == body_of("c")
                finally:
                    client.replicaof("NO", "ONE")

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

    def test_answers_that_make_no_sense_are_failures(self, tmp_path: Path) -> None:
        """The server, or what stands before it, answers in Redis's protocol with other types."""
        answers = dict(RIGHT_ANSWERS)
        clock = ManualClock()
        with QuickServer(("127.0.0.1", 0), answering(answers)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"redis://127.0.0.1:{server.server_address[1]}"
            with closing(self.open_remote(tmp_path, clock, url=url)) as tier:
                assert put(tier, "a") is PutResult.STORED
                answers |= {b"GETRANGE": b":5\r\n"}
                assert read(tier, "b") is None
                assert tier.usage().num_damaged == 1
                for command, wrong in ((b"EXISTS", b"$1\r\nx\r\n"), (b"INFO", NO_NUMBER)):
                    answers |= {command: wrong}
                    clock.advance(REPORT_INTERVAL_S)
                    wait_until(lambda: not find_and_look(tier))
                    answers |= RIGHT_ANSWERS
                    wait_available(tier, clock)
                answers |= {b"SCAN": b":5\r\n"}
                with pytest.raises(StoreError):
                    tier.entries()
            answers |= {b"INFO": NO_NUMBER}
            with closing(self.open_remote(tmp_path, url=url)) as tier:
                assert not tier.usage().server.is_available
            factory = TIERS.build("redis", {"url": url})
            assert isinstance(factory, ReportsServer)
            with pytest.raises(StoreError):
                factory.report()
            server.shutdown()


def find_and_look(tier: RemoteTier) -> bool:
    """Whether the server is used, after another question."""
    assert tier.find([name_of("a")]) == 0
    return tier.is_available()


def bulk(text: bytes) -> bytes:
    """A string as Redis's protocol has it."""
    return b"$%d\r\n%s\r\n" % (len(text), text)


RIGHT_ANSWERS = {
    b"INFO": bulk(b"redis_version:8.0\r\nused_memory:1\r\nmaxmemory:2\r\n"),
    b"EXISTS": b":0\r\n",
    b"GETRANGE": bulk(b""),
    b"PEXPIRE": b":1\r\n",
    b"UNLINK": b":1\r\n",
}
"""All other commands are answered with OK."""
NO_NUMBER = bulk(b"redis_version:8.0\r\nused_memory:lots\r\n")


def answering(answers: dict[bytes, bytes]) -> type[socketserver.StreamRequestHandler]:
    """Each command with what `answers` has for it then."""

    class Answering(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                words = [self.read_word() for _ in range(int(line[1:]))]
                self.wfile.write(answers.get(words[0].upper(), b"+OK\r\n"))

        def read_word(self) -> bytes:
            num_bytes = int(self.rfile.readline()[1:])
            return self.rfile.read(num_bytes + 2)[:num_bytes]

    return Answering
