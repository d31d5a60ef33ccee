"""`baton store serve` beside users of the same store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import redis

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.ops.store_daemon import TierCare, run_round
from baton.store.folder.tier import FolderTier
from baton.store.interface import PeerAccess, PutResult
from baton.store.remote.tier import REPORT_INTERVAL_S
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import BODY_BYTES, body_of, name_of, put, read, read_lease
from tests.free_ports import find_free_port
from tests.store_servers import RedisServer, fill_memory, limit_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from baton.store.capacity import StoredEntry
    from baton.store.tiered import TieredStore

KEY = "5" * 64
WAIT_S = 20.0
ENTRY_BYTES = 12_288


def open_store(*kinds: str, **options: dict[str, object]) -> TieredStore:
    key = ClusterKey.from_hex(KEY)
    peers = PeerAccess(Credentials.of(key))
    return open_keyed_store(kinds, options, key=key, clock=MachineClock(), peers=peers)


@contextmanager
def daemon(
    kind: str,
    options: dict[str, object],
    key: str = KEY,
    flags: tuple[str, ...] = (),
    more_bytes: int | None = None,
) -> Generator[str]:
    """A running daemon's URL. It must end by SIGTERM with exit code 0.

    `more_bytes`: all the memory that it gets once it is up.
    """
    settings = [f"--set=store.options.{kind}.{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "baton.cli", "store", "serve", "--store", kind, "--port", "0"]
    with subprocess.Popen(
        [*command, *settings, *flags],
        env=dict(os.environ, BATON_CLUSTER_KEY=key),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            if more_bytes is not None:
                limit_memory(process.pid, more_bytes)
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def get(url: str) -> tuple[int, str]:
    try:
        with urlopen(url, timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except HTTPError as exc:
        return exc.code, exc.read().decode()


def sample(url: str, name: str) -> float:
    lines = get(f"{url}/metrics")[1].splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.rsplit(" ", 1)[1])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_shared_tier_outlives_its_workers(tmp_path: Path) -> None:
    options: dict[str, object] = {"directory": str(tmp_path), "capacity_bytes": 100_000}
    with daemon("shared", options) as url:
        with closing(open_store("shared", shared=options)) as store:
            put(store, "a")
        with closing(open_store("shared", shared=options)) as store:
            assert read(store, "a") == body_of("a")
        assert get(f"{url}/health")[0] == 200
        assert get(f"{url}/other")[0] == 404
        assert sample(url, 'baton_store_used_bytes{tier="shared"}') == ENTRY_BYTES
    assert list(tmp_path.iterdir()) == []  # the last user has taken the memory away


def test_room_is_made_before_it_is_needed_and_old_entries_go(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options: dict[str, object] = {
        "directory": str(folder),
        "capacity_bytes": 40 * ENTRY_BYTES,
        "ttl_s": 3600,
    }
    with closing(open_store("file", file=options)) as store:
        for i in range(40):
            put(store, f"entry {i}")
        assert len(store.entries()) == 40
        an_hour_ago = time.time() - 3601
        os.utime(folder / name_of("entry 39").hex(), (an_hour_ago, an_hour_ago))
        with daemon("file", options) as url:
            wait_until(lambda: len(store.entries()) == 36)
            left = {entry.name for entry in store.entries()}
            assert name_of("entry 39") not in left, "it was too old"
            assert name_of("entry 0") not in left, "the least recently used"
            expired = 'baton_store_evictions_total{outcome="expired",tier="file"}'
            assert sample(url, expired) == 1
            assert sample(url, 'baton_store_evictions_total{outcome="dropped",tier="file"}') == 3


def test_its_memory_is_a_tier_of_workers_on_other_hosts() -> None:
    port = find_free_port()
    options: dict[str, object] = {"capacity_bytes": 20 * BODY_BYTES}
    peer: dict[str, object] = {"urls": [f"tcp://127.0.0.1:{port}"], "timeout_s": 10.0}
    with (
        daemon("host", options, flags=("--listen", f"127.0.0.1:{port}")) as url,
        closing(open_store("host", "peer", peer=peer)) as one,
        closing(open_store("host", "peer", peer=peer)) as two,
    ):
        for i in range(30):
            put(one, f"entry {i}")
        newest = [name_of(f"entry {i}") for i in range(10, 30)]
        wait_until(lambda: two.find(newest) == 20)
        assert [read(two, f"entry {i}") for i in range(10, 30)] == [
            body_of(f"entry {i}") for i in range(10, 30)
        ]
        assert two.find([name_of("entry 0")]) == 0, "it has room for 20"
        assert sample(url, 'baton_store_used_bytes{tier="host"}') == 20 * BODY_BYTES
        assert sample(url, 'baton_store_peer_entries_total{op="write",tier="host"}') == 30
        assert sample(url, 'baton_store_peer_entries_total{op="read",tier="host"}') >= 20
        assert sample(url, 'baton_store_peer_bytes_total{op="read",tier="host"}') >= 20 * BODY_BYTES
        assert get(f"{url}/health")[0] == 200


def test_without_memory_it_takes_no_more_and_is_read() -> None:
    port, body = find_free_port(), bytes(4 << 20)
    peer: dict[str, object] = {"urls": [f"tcp://127.0.0.1:{port}"], "timeout_s": 10.0}
    flags = ("--listen", f"127.0.0.1:{port}", "--verify-mib-per-s", "0")
    with (
        daemon("host", {"capacity_bytes": 1 << 40}, flags=flags, more_bytes=64 << 20) as url,
        closing(open_store("peer", peer=peer)) as store,
        closing(open_store("peer", peer=peer)) as other,  # it was refused nothing yet
    ):
        stored = fill_memory(store, body)
        assert store.find(stored) == len(stored) > 4
        lease = store.try_lease(stored[0])
        assert lease is not None
        with lease:
            assert read_lease(lease) == body
        for name in stored[:4]:  # what comes is copied, and a thread that shows metrics has a stack
            store.discard(name)
        used_bytes = (len(stored) - 4) * len(body)
        assert sample(url, 'baton_store_used_bytes{tier="host"}') == used_bytes
        assert other.put(name_of("another"), body) is PutResult.STORED


@pytest.mark.parametrize("is_key_wrong", [False, True])
def test_damaged_entries_are_found_unless_the_key_is_wrong(
    tmp_path: Path, is_key_wrong: bool
) -> None:
    folder = tmp_path / "kv"
    options: dict[str, object] = {"directory": str(folder)}
    with closing(open_store("file", file=options)) as store:
        for content in "abc":
            put(store, content)
        path = folder / name_of("b").hex()
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert path.stat().st_size > BODY_BYTES
        with daemon("file", options, "6" * 64 if is_key_wrong else KEY) as url:
            damaged = 'baton_store_verified_entries_total{result="damaged",tier="file"}'
            wait_until(lambda: sample(url, damaged) >= (3 if is_key_wrong else 1))
            wait_until(lambda: path.exists() == is_key_wrong)
            status, health = get(f"{url}/health")
            assert (status, "cluster key" in health) == (
                (503, True) if is_key_wrong else (200, False)
            )
        assert len(store.entries()) == (3 if is_key_wrong else 2)


def test_with_a_wrong_key_each_entry_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read again and again, and never removed: neither the log nor memory may grow."""
    options: dict[str, object] = {"directory": str(tmp_path / "kv")}
    with closing(open_store("file", file=options)) as store:
        for content in "abc":
            put(store, content)
    wrong_key = ClusterKey.from_hex("6" * 64)
    other = open_keyed_store(("file",), {"file": options}, key=wrong_key, clock=MachineClock())
    with closing(other):
        care = TierCare(other.tiers[0])
        for _ in range(4):
            run_round([care], 1 << 20)
        assert (care.num_damaged, care.is_key_doubtful) == (12, True)
    reported = [each.getMessage() for each in caplog.records if "is damaged" in each.getMessage()]
    assert len(reported) == len(set(reported)) == 3


def test_all_tiers_are_maintained_before_entries_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    maintain, entries = FolderTier.maintain, FolderTier.entries

    def note_maintain(tier: FolderTier) -> None:
        steps.append("maintain")
        maintain(tier)

    def note_entries(tier: FolderTier) -> list[StoredEntry]:
        steps.append("list")
        return entries(tier)

    folder = {"directory": str(tmp_path / "kv")}
    with closing(
        open_store("shared", "file", shared={"directory": str(tmp_path)}, file=folder)
    ) as store:
        put(store, "a")
        monkeypatch.setattr(FolderTier, "maintain", note_maintain)
        monkeypatch.setattr(FolderTier, "entries", note_entries)
        cares = [TierCare(tier) for tier in store.tiers]
        run_round(cares, 1)
    assert steps == ["maintain", "maintain", "list", "list"]
    assert [care.num_whole for care in cares] == [1, 0]


def test_of_a_server_it_is_asked_how_it_is_and_no_entry_is_read(tmp_path: Path) -> None:
    """Others share the server, and each list and each read may be billed."""
    server, clock = RedisServer(tmp_path), ManualClock()
    options = {"redis": {"url": server.url, "timeout_s": 60.0}}
    key = ClusterKey.from_hex(KEY)
    try:
        with closing(open_keyed_store(("redis",), options, key=key, clock=clock)) as store:
            put(store, "a")
            care = TierCare(store.tiers[0])

            def is_well() -> bool:
                clock.advance(REPORT_INTERVAL_S)
                run_round([care], 1 << 20)
                return not care.error

            assert is_well()
            assert is_well()
            with closing(redis.Redis(port=server.port)) as client:
                commands = client.info("commandstats")
            assert not {"cmdstat_scan", "cmdstat_getrange", "cmdstat_get"} & set(commands)
            assert care.num_whole == 0
            server.kill()
            wait_until(lambda: not is_well())
            assert care.num_failed_rounds
    finally:
        server.close()
