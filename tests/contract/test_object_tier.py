"""The tier `object`, on a real S3 server."""

from __future__ import annotations

import socketserver
import threading
import time
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING

import pytest

from baton.errors import ConfigError, StoreError
from baton.store.interface import TIERS, PutResult, TierContext
from baton.store.remote.client import EntryRefusedError
from baton.store.remote.refused_reads import READ_AGAIN_S
from baton.store.tiers.object import NUM_AT_ONCE, ObjectClient, ObjectTierOptions
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import (
    CONTRACT_KEY,
    body_of,
    name_of,
    put,
    read,
)
from tests.contract.server_faults import (
    SLACK_S,
    TIMEOUT_S,
    QuickServer,
    ServerFaultContract,
    count_calls,
    taking_at_most,
    use_while_down,
)
from tests.store_servers import S3Server, delayed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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

    def test_of_a_long_prompt_in_a_distant_bucket_the_beginning_is_found(self) -> None:
        num_keys, num_asked = 3000, count(1)

        class Server(QuickServer):
            request_queue_size = NUM_AT_ONCE

        class Distant(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                next(num_asked)
                while self.rfile.readline().strip():
                    pass
                time.sleep(0.05)
                self.wfile.write(
                    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n"
                    b"last-modified: Fri, 27 Nov 2026 10:00:00 GMT\r\n\r\n"
                )

        with Server(("127.0.0.1", 0), Distant) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            options = ObjectTierOptions("s3://kv", endpoint, "us-east-1", timeout_s=4.0)
            found = ObjectClient(options, "c").exists([f"{i:04}" for i in range(num_keys)])
            server.shutdown()
        num_found = sum(found)
        assert list(found) == [True] * num_found + [False] * (num_keys - num_found)
        assert NUM_AT_ONCE <= num_found < num_keys
        assert next(num_asked) <= num_found + 1

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

    def test_an_archived_entry_is_a_miss_by_itself(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock)) as tier:
            for content in "abcd":
                put(tier, content)
            values = {content: self.raw_get(self.path(tmp_path, content)) for content in "abcd"}

            def archive(content: str) -> None:
                key = f"baton/{self.path(tmp_path, content)}"
                self.server.request("PUT", key, values[content], storage_class="GLACIER")

            archive("b")
            names = [name_of(content) for content in "abcd"]
            assert tier.find(names) == 4, "it is found until it is read"
            for _ in range(4):
                assert read(tier, "b") is None
                assert tier.find(names) == 1
            assert [read(tier, content) for content in "acd"] == [*map(body_of, "acd")]
            asked = count_calls(tier._client, "read")
            assert read(tier, "b") is None
            assert put(tier, "b") is PutResult.EXISTS
            assert asked == []
            with pytest.raises(StoreError, match="object"):
                tier.is_whole(name_of("b"))
            assert (tier.usage().server.is_available, tier.usage().num_damaged) == (True, 0)
            self.raw_put(self.path(tmp_path, "b"), values["b"] or b"")
            clock.advance(READ_AGAIN_S)
            assert read(tier, "b") == body_of("b")
            for content in "abc":
                archive(content)
            tier._ahead.clear()
            for content in "abc":
                assert tier.usage().server.is_available
                assert read(tier, content) is None
            assert not tier.usage().server.is_available, "it refuses all of them"

    def test_a_conflict_when_an_entry_is_read_is_its_refusal(self) -> None:
        """As Azure answers for archived blobs."""

        class Conflict(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.rfile.readline()
                self.wfile.write(b"HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n")

        with QuickServer(("127.0.0.1", 0), Conflict) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            client = ObjectClient(ObjectTierOptions("s3://kv", endpoint, "us-east-1"), "c")
            with pytest.raises(EntryRefusedError):
                client.read(name_of("a").hex(), 1000)
            server.shutdown()

    def test_a_bucket_that_is_not_there_is_a_server_that_fails(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path, url="s3://nowhere/kv")) as tier:
            assert not tier.usage().server.is_available
            with pytest.raises(StoreError):
                tier._client.put(name_of("a").hex(), b"a bucket that was removed meanwhile")

    def test_entries_of_a_distant_bucket_come_at_once(self, tmp_path: Path) -> None:
        contents, names = [f"entry {i}" for i in range(8)], []
        with delayed(self.server.port, 0.06) as port:
            endpoint = f"http://127.0.0.1:{port}"
            with closing(self.open_remote(tmp_path, endpoint=endpoint)) as tier:
                for content in contents:
                    put(tier, content)
                    names.append(name_of(content))
                began = time.monotonic()
                for content in contents:
                    assert read(tier, content) == body_of(content)
                one_by_one_s = time.monotonic() - began
                assert one_by_one_s > 8 * 0.06, "the bucket is not distant"
                assert tier.find(names) == len(names)
                began = time.monotonic()
                for content in contents:
                    assert read(tier, content) == body_of(content)
                assert time.monotonic() - began < 0.75 * one_by_one_s

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
