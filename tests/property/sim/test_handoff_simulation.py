"""The handoff's production code in simulated clusters: clean, repeatable, and able to find bugs."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import pytest

from baton.sim.handoff.campaign import Tally, run_schedule, run_seeds, shrink
from baton.sim.handoff.generating import generate_schedule
from tests.property.sim.planted import PLANTED, double_completion, no_digest_check

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_SEED, NUM_CHUNKS, SEEDS_IN_CHUNK = 11_050, 2, 50
"""`make simulate` runs 100,000 of them, each night. In these every event is drawn soon."""
MAX_SEEDS = 800

EVERY_FAULT = {
    "crash",
    "cut",
    "failed transfer",
    "late notification",
    "late store",
    "parted",
    "pause",
    "refused",
    "replay",
    "corrupted: flip",
    "corrupted: repeat",
    "corrupted: swap",
    "corrupted: truncate",
    "corrupted: zero",
}
ENTRY_FAULTS = {
    "entry: refuse",
    "entry: lose",
    "entry: flip",
    "entry: cut",
    "entry: swap",
    "evicted",
    "damaged",
}
EVERY_EVENT = {
    "lease lapsed",
    "lease renewed",
    "export",
    "import copied",
    "export released",
    "import revoked",
    "mode pool",
    "mode pull",
    "mode push",
    "mode reference",
    "prefix looked for",
    "prefix asked for",
    "prefix loaded",
    "prefix to be kept",
    "layers landing",
    "layer computed as it landed",
    "layer late",
}
BEGIN = {
    "no_quarantine": 177,
    "no_epoch_check": 144,
    "early_free": 343,
    "early_free_of_the_source": 893,
    "no_digest_check": 6,
    "lost_wake": 33,
    "forgotten_lease": 2,
    "forgotten_grants": 218,
    "no_fence": 1_642,
    "lost_end": 19,
    "counted_twice": 119,
    "any_peer_is_heard": 942,
    "forgotten_graves": 1_048,
    "replayed_tickets": 753,
    "no_stall_detector": 4_502,
    "lease_not_checked": 770,
    "no_renewals": 15,
    "landed_under_a_copy": 16,
    "layers_are_counted_early": 68,
    "landing_blocks_are_kept": 68,
    "sent_under_a_copy": 7,
    "loans_end_with_links": 12,
    "loans_end_by_time": 132,
    "borrowers_live_for_ever": 208,
    "returns_are_said_once": 1_490,
    "lent_blocks_are_free": 69,
    "unmapped_in_use": 292,
    "refused_and_lent": 3_947,
    "any_borrower_returns": 499,
    "rot_is_believed": 13,
    "tails_without_tokens": 22,
    "kept_before_it_is_computed": 13,
    "part_is_taken_for_all": 13,
    "collections_for_ever": 41,
    "silent_abort": 7_970,
    "pooled_tickets_are_renewed": 5,
    "kept_blocks_are_freed_early": 5,
    "load_is_taken_for_whole": 5,
}
"""Where the search for a bug begins, shortly before a seed that finds it; else at 0."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of faults are logged by production code."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def run_chunk(chunk: int) -> Tally:
    """What both tests below look at runs once."""
    first = FIRST_SEED + chunk * SEEDS_IN_CHUNK
    return run_seeds(range(first, first + SEEDS_IN_CHUNK))


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_no_invariant_breaks(chunk: int) -> None:
    tally = run_chunk(chunk)
    assert not tally.found, "replay with: baton sim handoff --log --seed " + str(min(tally.found))


def test_every_kind_of_fault_takes_effect_and_most_requests_are_answered_nonetheless() -> None:
    tally = Tally()
    for chunk in range(8 * NUM_CHUNKS):  # recalls are seldom drawn
        tally.add(run_chunk(chunk))
        missing = (
            EVERY_FAULT | ENTRY_FAULTS
        ) - tally.injected.keys() | EVERY_EVENT - tally.seen.keys()
        if not missing:
            break
    assert not missing
    assert tally.ends["answered"] > 0.8 * tally.ends.total()


def test_a_seed_gives_the_same_run_to_the_last_line() -> None:
    for seed in range(300, 305):
        first, second = (run_schedule(generate_schedule(seed), keeps_log=True) for _ in range(2))
        assert first == second
        assert len(first.log) > 10


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: pytest.RecordProperty
) -> None:
    """Within `MAX_SEEDS`; how many it took is printed."""
    PLANTED[name](monkeypatch)
    begin = BEGIN.get(name, 0)
    for num_seeds, seed in enumerate(range(begin, begin + MAX_SEEDS), 1):
        violation = run_schedule(generate_schedule(seed)).violation
        if violation is not None:
            # The bug is the finding, not a patch that no longer fits what it replaces.
            assert not violation.what.startswith(("TypeError", "AttributeError")), violation
            print(f"{name}: found by seed {seed}, the {num_seeds}th: {violation}")
            record_property("num_seeds", num_seeds)
            return
    pytest.fail(f"{name} was not found in {MAX_SEEDS} seeds")


def test_a_failing_schedule_is_made_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    no_digest_check(monkeypatch)
    schedule = next(
        schedule
        for schedule in map(generate_schedule, range(1000))
        if len(schedule.faults) > 2 and run_schedule(schedule).violation
    )
    shorter = shrink(schedule)
    assert len(shorter.faults) < len(schedule.faults)
    before, after = (run_schedule(each).violation for each in (schedule, shorter))
    assert before is not None
    assert after is not None
    assert before.invariant == after.invariant


def test_a_schedule_that_breaks_nothing_stays_as_it_is() -> None:
    schedule = generate_schedule(0)
    assert shrink(schedule) is schedule


def test_chunks_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    double_completion(monkeypatch)
    tally = Tally()
    for seeds in (range(3), range(3, 5)):
        tally.add(run_seeds(seeds))
    assert tally.num_schedules == 5
    assert tally.found
    assert all(violation.invariant == "I4" for violation in tally.found.values())
    assert isinstance(tally.ends, Counter)
