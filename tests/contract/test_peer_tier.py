"""The tier `peer`: one server as a process of its own, and several `host` tiers of this process."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import Instant, MachineClock
from baton.errors import ConfigError, StoreError, StoreFullError
from baton.handoff.pool_mode.side_entries import HeartbeatEntryReader, HeartbeatEntryWriter
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.ops.store_archive import export_entries
from baton.store.counted_tier import CountedTier
from baton.store.entry_format import HEADER_BYTES, make_header
from baton.store.interface import TIERS, PeerAccess, PutResult, TenantLabel, TierContext
from baton.store.peer.client import PeerClient
from baton.store.peer.server import EntryServer, ServerOptions
from baton.store.tiered import open_store
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import (
    CONTRACT_KEY,
    SharedTierContract,
    body_of,
    name_of,
    put,
    read,
)
from tests.contract.server_faults import (
    DAY_S,
    QUICK_S,
    SLACK_S,
    TIMEOUT_S,
    ServerFaultContract,
    SetClock,
    taking_at_most,
    wait_available,
    wait_until,
)
from tests.free_ports import find_free_port
from tests.peer_server import RawEntries, access
from tests.store_peers import (
    CREDENTIALS,
    PATIENT_S,
    PeerServer,
    hosts,
    open_peers,
    url_of,
)
from tests.tickets import issue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.store.interface import Tier


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
            client.put(key, value.ljust(HEADER_BYTES, b"\0"))

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
            wait_until(lambda: sum(host.usage().peers.num_read for host in self.hosts) >= 60)

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


def test_what_one_peer_has_damaged_is_read_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.store.tiers.peer.secrets.randbelow", lambda _: 0)  # it comes first
    entries = RawEntries()
    wrong = EntryServer(
        entries, ServerOptions("127.0.0.1", 0, takes_entries=True, max_value_bytes=1 << 20)
    )
    wrong.start(access(serves=True), MachineClock())
    value = bytearray(make_header(CONTRACT_KEY, name_of("a"), body_of("a")) + body_of("a"))
    value[-1] ^= 1
    entries.put_value(name_of("a"), memoryview(value))
    with ExitStack() as stack, hosts(1) as [right]:
        stack.callback(wrong.stop)
        put(right, "a")
        with closing(open_peers(f"tcp://127.0.0.1:{wrong.address[1]}", url_of(right))) as tier:
            assert tier.find([name_of("a")]) == 1
            assert read(tier, "a") is None, "its tag is checked when it is copied"
            assert tier.usage().num_damaged == 1
            assert not entries.holds([name_of("a")])[0], "it was removed there"
            assert read(tier, "a") == body_of("a")


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_entries_make_room_in_their_turn_although_their_peers_clock_jumped(jump_s: float) -> None:
    clock, room_bytes = SetClock(), 4 * len(body_of("a"))
    with (
        hosts(1, capacity_bytes=room_bytes, clock=clock) as [host],
        closing(open_peers(url_of(host))) as tier,
    ):
        for content in "abcd":
            put(tier, content)
        clock.set_by(jump_s)
        assert read(tier, "a") == body_of("a")
        put(tier, "e")
        assert [content for content in "abcde" if read(tier, content) is not None] == [*"acde"]
        for content in "fghi":
            put(tier, content)
        assert {entry.name for entry in host.entries()} == {name_of(each) for each in "fghi"}


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


def test_an_entry_that_is_too_large_for_its_reader_stays() -> None:
    size = len(body_of("a"))
    with hosts(1, peers_may="read") as [host]:
        put(host, "a")
        with (
            closing(open_peers(url_of(host), max_entry_bytes=size - 1)) as small,
            closing(open_peers(url_of(host), max_entry_bytes=size)) as large,
        ):
            assert read(small, "a") is None
            with pytest.raises(StoreError, match="max_entry_bytes"):
                small.is_whole(name_of("a"))
            assert small.usage().num_damaged == 0
            assert read(large, "a") == body_of("a")


def test_an_entry_of_one_of_several_that_is_too_large_is_not_left_out_of_an_export_silently(
    tmp_path: Path,
) -> None:
    size = len(body_of("a"))
    with hosts(2, peers_may="read") as several, ExitStack() as stack:
        for content, host in zip("ab", several, strict=True):
            put(host, content)
            host.put(name_of(f"large {content}"), body_of("large", size + 1))
        peers = open_peers(*map(url_of, several), max_entry_bytes=size)
        tier = CountedTier("peer", stack.enter_context(closing(peers)))
        exported = export_entries([tier], tmp_path / "archive", ClusterKey.from_hex("5" * 64), ())
        assert (exported.num_entries, exported.num_unreadable) == (2, 2)


def test_workers_read_what_is_in_each_others_memory_and_keep_a_copy() -> None:
    with ExitStack() as stack:
        ports = [find_free_port(), find_free_port()]
        stores = []
        for own, other in (ports, ports[::-1]):
            options = {
                "host": {"listen": f"127.0.0.1:{own}"},
                "peer": {"urls": [f"tcp://127.0.0.1:{other}"], "timeout_s": PATIENT_S},
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
        for i in range(10):
            assert put(one, f"entry {i}") is PutResult.STORED
        names = [name_of(f"entry {i}") for i in range(10)]
        assert two.find(names) == 10
        for _ in range(3):
            assert [read(two, f"entry {i}") for i in range(10)] == [
                body_of(f"entry {i}") for i in range(10)
            ]
        assert two.tiers[0].find(names) == 10
        counts = one.tiers[0].usage().peers  # an entry is counted once its last byte was sent
        wait_until(lambda: counts.num_read >= 20)
        assert counts.num_read <= 22, "copied at the second read"
        assert two.tiers[0].usage().peers.num_written == 0


def test_entries_keep_their_tenant_from_memory_to_memory() -> None:
    label, num_bytes = TenantLabel(b"tenant-A"), len(body_of("a"))
    with hosts(2, capacity_bytes=8 * num_bytes, tenant_share=0.5) as several, ExitStack() as stack:
        options = {
            "peer": {"urls": [*map(url_of, several)], "timeout_s": PATIENT_S, "promote_at_read": 1}
        }
        store = open_store(
            ("host", "peer"),
            options,
            cluster="c",
            key=CONTRACT_KEY,
            clock=MachineClock(),
            peers=access(),
        )
        stack.enter_context(closing(store))
        own, peers = store.tiers
        for i in range(20):  # half of them without a wait, as `host` hands down
            (peers, store)[i % 2].put(name_of(f"entry {i}"), body_of(f"entry {i}"), label)
        assert all(peer._behind.wait_empty(PATIENT_S) for _, peer in peers.inner._peers)
        for host in several:
            entries = host.entries()
            assert {entry.tenant for entry in entries} == {label}
            assert 0 < sum(entry.num_bytes for entry in entries) <= 4 * num_bytes
            own.discard(entries[0].name)
            lease = store.try_lease(entries[0].name)
            assert lease is not None
            assert lease.tenant == label
        assert {entry.tenant for entry in own.entries()} == {label}, "copies have it, too"


def test_heartbeats_through_a_lower_tier_are_the_newest() -> None:
    """A copy of the first one in the reader's own memory would stand for a worker that hangs."""
    ref = WorkerRef(WorkerId("p"), new_epoch(), "127.0.0.1:1")
    ticket = Ticket(new_ticket_id(), "r", ref, ref, "pool", issue(60.0))
    alive: list[int] = []
    with hosts(1) as [daemon], ExitStack() as stack:
        options = {"peer": {"urls": [url_of(daemon)], "timeout_s": PATIENT_S, "promote_at_read": 1}}
        of_prefill, of_decode = (
            stack.enter_context(
                closing(
                    open_store(
                        ("host", "peer"),
                        options,
                        cluster="c",
                        key=CONTRACT_KEY,
                        clock=MachineClock(),
                        peers=access(),
                    )
                )
            )
            for _ in range(2)
        )
        writer = HeartbeatEntryWriter(of_prefill, 1.0)
        reader = HeartbeatEntryReader(of_decode, 1.0)
        for at in range(6):
            writer.write([ticket], Instant(at + 1.0))
            assert of_prefill.tiers[1].inner._behind.wait_empty(PATIENT_S)
            reader.poll([ref.epoch], Instant(at + 1.0), lambda _, at=at: alive.append(at))
    assert alive == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("peer", {"urls": []}, "urls"),
        ("peer", {"urls": ["http://127.0.0.1:1"]}, "tcp://HOST:PORT"),
        ("peer", {"urls": ["tcp://127.0.0.1"]}, "tcp://HOST:PORT"),
        ("peer", {"urls": ["tcp://user:secret@127.0.0.1:1"]}, "tcp://HOST:PORT"),
        ("peer", {"urls": ["tcp://127.0.0.1:1"] * 2}, "twice"),
        ("host", {"capacity_bytes": 0}, "capacity_bytes"),
        ("host", {"listen": "127.0.0.1"}, "HOST:PORT"),
        ("host", {"listen": "127.0.0.1:70000"}, "HOST:PORT"),
        ("host", {"listen": "127.0.0.1:0", "peers_may": "all"}, "peers_may"),
    ],
)
def test_options_that_make_no_sense(kind: str, options: dict[str, object], message: str) -> None:
    context = TierContext("c", CONTRACT_KEY, ManualClock(), peers=access(serves=True))
    with pytest.raises(ConfigError, match=message):
        TIERS.build(kind, options)(context)


def test_a_peer_needs_the_clusters_credentials() -> None:
    with pytest.raises(ConfigError, match="credentials"):
        TIERS.build("peer", {"urls": ["tcp://127.0.0.1:1"]})(
            TierContext("c", CONTRACT_KEY, ManualClock())
        )
    with pytest.raises(StoreError, match="cannot connect"):
        PeerClient(f"tcp://127.0.0.1:{find_free_port()}", access(), 1.0).report()
