"""What a worker reports of its store: real tiers, which were written to and asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from baton.clock import MachineClock
from baton.handoff.pool_mode.prefix_store import PrefixCounts
from baton.handoff.pool_mode.store_report import report_store
from baton.store.interface import EntryName
from baton.store.tiered import TieredStore, open_store
from baton.telemetry.transfer_report import StoreReport

if TYPE_CHECKING:
    from pathlib import Path


def open_tiers(directory: Path) -> TieredStore:
    options = {"file": {"directory": str(directory)}, "host": {"capacity_bytes": 1 << 20}}
    return open_store(["host", "file"], options, cluster="c", key=b"k" * 32, clock=MachineClock())


def handoffs_of(store: TieredStore, counts: PrefixCounts) -> Any:
    """As much of a `StoreHandoff` as is read."""
    access, prefixes = SimpleNamespace(store=store), SimpleNamespace(counts=counts)
    return SimpleNamespace(access=access, prefixes=prefixes)


def test_tiers_and_prompts_are_reported_as_they_are(tmp_path: Path) -> None:
    store = open_tiers(tmp_path / "store")
    try:
        counts = PrefixCounts(num_whole=3, num_given_up=1, num_missing=2, num_failed=9)
        handoffs = handoffs_of(store, counts)
        there, elsewhere = EntryName(b"t" * 32), EntryName(b"e" * 32)
        store.put(there, b"x" * 5000)
        for name in (there, there, elsewhere):
            if (lease := store.try_lease(name)) is not None:
                lease.release()
        report = report_store(handoffs)
        assert report is not None
        assert report == msgspec.json.decode(msgspec.json.encode(report), type=StoreReport)
        assert (report.num_prompts_found, report.num_prompts_missing) == (4, 2)
        host, file = report.tiers
        assert (host.tier, host.num_hits, host.num_misses) == ("host", 2, 1)
        assert (host.read_bytes, host.written_bytes) == (10_000, 5000)
        assert 5000 <= host.used_bytes <= host.capacity_bytes == 1 << 20
        assert (file.tier, file.num_hits, file.num_misses) == ("file", 0, 1)
        assert file.is_available
    finally:
        store.close()


def test_a_worker_without_a_store_reports_none() -> None:
    assert report_store(None) is None
