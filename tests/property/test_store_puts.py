"""Several entries that are put at once: a fault costs one of them, and the counts stay right."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import MachineClock
from baton.errors import StoreError, StoreFullError
from baton.store.folder.body_pool import EXTENT_BYTES, MAX_PACKED_BYTES, Run, split_runs
from baton.store.interface import NamedBody, PutResult, TenantLabel, TierContext
from baton.store.tiers.shared import SharedTier, SharedTierOptions
from baton.testing.store_contract import CONTRACT_KEY, body_of, name_of, read, scan
from baton.testing.store_syscalls import failing
from tests.contract.direct_tier import open_direct_tier
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from baton.store.folder.tier import FolderTier

MUCH_ROOM = 1 << 24
SIZES = (0, 100, 6_000, 10_000, 40_000)
"""Bodies on either side of what the two tiers hold for large; some of several pieces."""
TENANT = TenantLabel(b"a tenant")
CONTENTS = st.integers(0, 9).map(lambda number: f"{number}")
ERRORS = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EROFS])


class PooledTier(SharedTier):
    """Bodies lie in the pool, small as they are."""

    min_pooled_bytes = MAX_PACKED_BYTES


def open_tier(kind: str, place: Path, capacity_bytes: int = MUCH_ROOM) -> FolderTier:
    if kind == "file":
        return open_direct_tier(place, capacity_bytes, durable="all")
    options = SharedTierOptions(directory=str(place), capacity_bytes=capacity_bytes)
    return PooledTier(options, TierContext("puts", CONTRACT_KEY, MachineClock()))


def entry(content: str) -> NamedBody:
    return NamedBody(name_of(content), body_of(content, SIZES[int(content) % len(SIZES)]))


def check_counts(tier: FolderTier) -> None:
    capacity = tier._capacity.peek()
    assert capacity.reserved_bytes == 0
    assert capacity.committed_bytes == scan(tier).used_bytes == tier._capacity.peek_held(TENANT)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        *(("file", c) for c in ("open", "posix_fallocate", "write", "fdatasync", "utime", "link")),
        *(("shared", call) for call in ("open", "write", "ftruncate", "utime", "link")),
    ],
)
@settings(max_examples=examples(15))
@given(contents=st.lists(CONTENTS, min_size=1, max_size=8), at=st.integers(0, 7), error=ERRORS)
def test_a_fault_costs_one_entry(
    kind: str, call: str, contents: Sequence[str], at: int, error: int
) -> None:
    def fail() -> None:
        raise OSError(error, os.strerror(error))

    entries = [entry(content) for content in contents]
    with tempfile.TemporaryDirectory() as place, closing(open_tier(kind, Path(place))) as tier:
        tier.put_many([NamedBody(name_of("warm"), body_of("warm", 4 * EXTENT_BYTES))], TENANT)
        with failing(at, fail, (call,)) as calls:
            outcomes = tier.put_many(entries, TENANT)
        failed = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
        # Where the filesystem is full others make room, and the entry is written once more.
        is_kept = error == errno.ENOSPC
        assert len(failed) == (calls.has_failed and not is_kept), (outcomes, calls.num_calls)
        assert not any(isinstance(each, StoreFullError) for each in failed)
        for content in contents:
            of_it = [each for each, c in zip(outcomes, contents, strict=True) if c == content]
            num_stored = of_it.count(PutResult.STORED)
            assert num_stored <= 1
            assert (read(tier, content) == entry(content).body) == num_stored
            assert num_stored or set(of_it) & set(failed)
        check_counts(tier)
        again = tier.put_many(entries, TENANT)
        assert not any(isinstance(outcome, StoreError) for outcome in again)
        assert all(read(tier, content) == entry(content).body for content in contents)
        check_counts(tier)


@pytest.mark.parametrize("kind", ["file", "shared"])
@settings(max_examples=examples(15))
@given(batches=st.lists(st.lists(CONTENTS, max_size=8), max_size=6))
def test_a_small_tier_has_what_it_states(kind: str, batches: Sequence[Sequence[str]]) -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        closing(open_tier(kind, Path(place), 6 * EXTENT_BYTES)) as tier,
    ):
        for contents in batches:
            outcomes = tier.put_many([entry(content) for content in contents], TENANT)
            assert all(isinstance(outcome, PutResult) for outcome in outcomes)
            for content in contents:
                assert read(tier, content) in {None, entry(content).body}
            if outcomes[-1:] == [PutResult.STORED]:
                assert read(tier, contents[-1]) == entry(contents[-1]).body
            check_counts(tier)
            assert scan(tier).used_bytes <= scan(tier).capacity_bytes


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3))), st.randoms())
def test_runs_are_divided_without_a_gap(lengths: Sequence[tuple[int, int]], chance: Random) -> None:
    runs, first = [], 0
    for num_extents, gap in lengths:
        runs.append(Run(first, num_extents))
        first += num_extents + gap
    extents = [extent for run in runs for extent in range(run.first, run.stop)]
    cuts = sorted(chance.choices(range(len(extents) + 1), k=3))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, len(extents)], strict=True)]
    parts = split_runs(runs, counts)
    assert [e for part in parts for run in part for e in range(run.first, run.stop)] == extents
    assert [sum(run.num_extents for run in part) for part in parts] == counts
