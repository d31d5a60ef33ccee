"""The tier `file` where it compresses: what is read is what was put, in tiers beside it, too."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from baton.clock import Instant, MachineClock
from baton.errors import StoreError
from baton.store.compression import compress
from baton.store.counted_tier import make_families
from baton.store.entry_format import HEADER_BYTES, make_header
from baton.store.folder import bodies, directory
from baton.store.interface import NO_TENANT, TIERS, TenantLabel, TierContext
from baton.store.tiered import open_store
from baton.store.tiers.file import FileTierOptions
from baton.testing.store_contract import CONTRACT_KEY, body_of, name_of, read_lease
from baton.testing.store_faults import flip_bit
from tests.contract.direct_tier import DirectTier
from tests.store_servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from baton.clock import Clock, UnixTime
    from baton.store.interface import Body, Tier
    from baton.store.remote.tier import RemoteTier
    from baton.store.tiered import TieredStore

CLOCK = MachineClock()
KV_BYTES = 1 << 18
TENANT = TenantLabel(b"tenant-A")
RNG = np.random.default_rng(5)
KV = [RNG.normal(size=KV_BYTES // 2).astype(ml_dtypes.bfloat16).tobytes() for _ in range(12)]


@dataclass(slots=True)
class DiskClock:
    """This thread's CPU time, which others' load does not change, and what a disk takes."""

    byte_s: float = 200e-9
    waited_s: float = 0.0

    def now(self) -> Instant:
        return Instant(time.thread_time() + self.waited_s)

    def unix_now(self) -> UnixTime:
        return CLOCK.unix_now()


def opened(
    place: Path,
    *kinds: str,
    compress: object = True,
    clock: Clock = CLOCK,
    **shared: object,
) -> TieredStore:
    options = {
        "shared": {"directory": str(place)} | shared,
        "file": {"directory": str(place / "kv"), "compress": compress},
    }
    return open_store(kinds or ("file",), options, cluster="test", key=CONTRACT_KEY, clock=clock)


def read(tier: Tier, content: str) -> bytes | None:
    lease = tier.try_lease(name_of(content))
    if lease is None:
        return None
    with lease:
        return read_lease(lease)


def samples(store: TieredStore) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in make_families(store.reports())
        for sample in family.samples
    }


def test_kv_takes_less_room_and_is_what_was_put(tmp_path: Path) -> None:
    noise, small = body_of("noise", KV_BYTES), body_of("small", 100)
    with closing(opened(tmp_path)) as store:
        for content, body in (("kv", KV[0]), ("noise", noise), ("small", small)):
            store.put(name_of(content), body, TENANT)
        sizes = {entry.name: entry.num_bytes for entry in store.entries()}
        assert sizes[name_of("kv")] < 0.9 * KV_BYTES
        assert sizes[name_of("noise")] >= KV_BYTES
        assert store.usage().used_bytes == sum(sizes.values())
        found = samples(store)
        assert found["baton_store_compressing", "file"] == 1
        assert found["baton_store_compression_bytes_total", "file", "raw"] == 2 * KV_BYTES
        assert found["baton_store_compression_bytes_total", "file", "compressed"] < 1.9 * KV_BYTES
        lease = store.try_lease(name_of("kv"))
        assert lease is not None
        assert (lease.num_bytes, lease.tenant) == (KV_BYTES, TENANT)
        lease.release()
    with closing(opened(tmp_path, compress=False)) as store:  # an operator's change
        assert (read(store, "kv"), read(store, "noise"), read(store, "small")) == (
            KV[0],
            noise,
            small,
        )
        assert store.tiers[0].is_whole(name_of("kv"))
        store.discard(name_of("noise"))
        store.put(name_of("noise"), noise)
        assert ("baton_store_compressing", "file") not in samples(store)


@pytest.mark.parametrize("at", [60, 70, 78, 86, HEADER_BYTES, HEADER_BYTES + 1000, -1])
def test_a_flipped_bit_is_a_miss(tmp_path: Path, at: int) -> None:
    with closing(opened(tmp_path)) as store:
        store.put(name_of("kv"), KV[0], NO_TENANT)
        path = tmp_path / "kv" / name_of("kv").hex()
        flip_bit(path, at % path.stat().st_size, 2)
        assert read(store, "kv") is None
        assert store.tiers[0].usage().num_damaged == 1
        assert store.find([name_of("kv")]) == 0


def test_it_is_whole_again_in_the_tier_above(tmp_path: Path) -> None:
    store = opened(tmp_path, "shared", "file", capacity_bytes=5 * KV_BYTES)
    with closing(store):
        for i, body in enumerate(KV):
            store.put(name_of(f"kv {i}"), body, TENANT)
        assert store.tiers[0].usage().num_demoted > 0
        down = [e for e in store.tiers[1].entries() if e.tenant == TENANT]
        assert len(down) == store.tiers[0].usage().num_demoted
        assert all(entry.num_bytes < 0.9 * KV_BYTES for entry in down)
        for i, body in enumerate(KV):
            assert read(store, f"kv {i}") == body
        assert all(e.num_bytes > KV_BYTES for e in store.tiers[0].entries())


def test_it_is_whole_again_in_the_tier_below(tmp_path: Path) -> None:
    """The tier below gets what was put, not what this one has made of it."""
    options = {
        "file": {"directory": str(tmp_path / "kv"), "compress": True, "capacity_bytes": 900_000},
        "shared": {"directory": str(tmp_path)},
    }
    store = open_store(("file", "shared"), options, cluster="t", key=CONTRACT_KEY, clock=CLOCK)
    with closing(store):
        for i, body in enumerate(KV):
            store.put(name_of(f"kv {i}"), body, TENANT)
        upper, lower = store.tiers
        assert upper.usage().num_demoted > 0
        assert upper.usage().num_dropped == 0
        for entry in lower.entries():
            assert entry.tenant == TENANT
            assert entry.num_bytes > KV_BYTES
        for i, body in enumerate(KV):
            found = [read(tier, f"kv {i}") for tier in store.tiers]
            assert body in found
            assert set(found) <= {body, None}


def test_what_is_large_when_it_is_compressed_goes_past_the_page_cache(tmp_path: Path) -> None:
    num_direct = 0

    class CountingTier(DirectTier):
        min_direct_bytes = 100_000

        def __init__(self, options: FileTierOptions) -> None:
            super().__init__(options, TierContext("c", CONTRACT_KEY, CLOCK))
            files = self._bodies._files
            begin = files.begin

            def count(*args: object, **named: object) -> object:
                nonlocal num_direct
                num_direct += 1
                return begin(*args, **named)

            files.begin = count

    options = FileTierOptions(directory=str(tmp_path / "kv"), compress=True)
    with closing(CountingTier(options)) as tier:
        assert tier.usage().direct_io, "set TMPDIR to a filesystem that has O_DIRECT"
        tier.put(name_of("large"), KV[0], TENANT)
        assert num_direct == 1
        tier.put(name_of("small"), KV[1][:120_000], TENANT)
        assert num_direct == 1, "compressed, it is small"
        assert read(tier, "large") == KV[0]
        assert read(tier, "small") == KV[1][:120_000]
        assert {entry.tenant for entry in tier.entries()} == {TENANT}
        assert all(entry.num_bytes < 0.9 * KV_BYTES for entry in tier.entries())
    with closing(opened(tmp_path, compress=False)) as store:
        assert read(store, "large") == KV[0]


def test_auto_compresses_on_a_slow_disk_and_stops_on_a_quick_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, write = DiskClock(), directory.write_all

    def write_slowly(fd: int, buffers: Iterable[Body], min_bytes: int = 0) -> None:
        whole = b"".join(buffers)
        clock.waited_s += len(whole) * clock.byte_s
        write(fd, [whole], min_bytes)

    monkeypatch.setattr(bodies, "write_all", write_slowly)
    with closing(opened(tmp_path, compress="auto", clock=clock)) as store:

        def put(content: str) -> bool:
            """Whether it was compressed."""
            store.put(name_of(content), KV[0])
            (size,) = [e.num_bytes for e in store.entries() if e.name == name_of(content)]
            store.discard(name_of(content))
            return size < KV_BYTES

        assert samples(store)["baton_store_compressing", "file"] == 0
        slow = [put(f"slow {i}") for i in range(6)]
        assert all(slow)
        assert samples(store)["baton_store_compressing", "file"] == 1
        clock.byte_s = 0.0
        quick = [put(f"quick {i}") for i in range(120)]
        assert samples(store)["baton_store_compressing", "file"] == 0
        assert sum(quick[-64:]) <= 1, "a trial"


@pytest.fixture(name="server_options", params=["redis", "object"])
def server_options_fixture(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, dict[str, object]]]:
    if request.param == "object":
        yield "object", {"url": f"file://{tmp_path}/bucket"}
        return
    with closing(RedisServer(tmp_path)) as server:
        yield "redis", {"url": server.url, "timeout_s": 30.0}


def open_server(server_options: tuple[str, dict[str, object]], **changed: object) -> RemoteTier:
    kind, options = server_options
    context = TierContext("test", CONTRACT_KEY, CLOCK)
    return TIERS.build(kind, options | changed)(context)  # type: ignore[return-value]


def test_servers_keep_fewer_bytes_and_any_worker_reads_them(
    server_options: tuple[str, dict[str, object]],
) -> None:
    noise = body_of("noise", KV_BYTES)
    with closing(open_server(server_options, compress=True)) as tier:
        tier.put(name_of("put"), KV[0], TENANT)
        tier.put_behind(name_of("behind"), KV[0], TENANT)
        tier.put(name_of("noise"), noise)
        assert read(tier, "put") == read(tier, "behind") == KV[0]
        assert tier.is_whole(name_of("put"))
        report = tier.usage().compression
        assert report.raw_bytes == 3 * KV_BYTES
        assert report.compressed_bytes < 2.8 * KV_BYTES
    with closing(open_server(server_options)) as tier:
        assert read(tier, "put") == read(tier, "behind") == KV[0]
        assert read(tier, "noise") == noise
        assert tier.usage().compression is None
        sizes = {entry.name: entry.num_bytes for entry in tier.entries()}
        assert sizes[name_of("put")] < 0.9 * KV_BYTES
        assert sizes[name_of("noise")] > KV_BYTES
        with tier.try_lease(name_of("put")) as lease:
            assert lease.tenant == TENANT


def test_an_entry_that_is_too_large_for_this_reader_when_decompressed_is_anothers(
    server_options: tuple[str, dict[str, object]],
) -> None:
    """As while workers are restarted with another `max_entry_bytes`."""
    name = name_of("a")
    with closing(open_server(server_options, compress=True)) as tier:
        tier.put(name, KV[0])
        with closing(open_server(server_options, max_entry_bytes=KV_BYTES - 1)) as small:
            assert read(small, "a") is None
            with pytest.raises(StoreError, match=f"{KV_BYTES} bytes.*max_entry_bytes"):
                small.is_whole(name)
            assert small.usage().num_damaged == 0
        assert read(tier, "a") == KV[0]


@pytest.mark.parametrize(
    ("key", "stated", "max_bytes"),
    [(bytes(32), KV_BYTES, KV_BYTES - 1), (CONTRACT_KEY, KV_BYTES + 2, None)],
)
def test_a_length_that_is_not_the_bodys_is_a_miss(
    server_options: tuple[str, dict[str, object]], key: bytes, stated: int, max_bytes: int | None
) -> None:
    """More than any entry has, before memory is taken for it; or authentic, and wrong."""
    changed = {} if max_bytes is None else {"max_entry_bytes": max_bytes}
    name, kept = name_of("a"), compress(KV[0])
    header = make_header(key, name, kept, whole_bytes=stated)
    with closing(open_server(server_options, **changed)) as tier:
        tier._client.put(name.hex(), header + kept)
        lease = tier.try_lease(name)
        assert (lease is None) == (max_bytes is not None)
        assert lease is None or not lease.try_read(memoryview(bytearray(stated)))
        assert tier.usage().num_damaged == 1
        assert tier.find((name,)) == 0, "it was removed"
