from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.clock import Instant
from baton.telemetry.metrics import HeldBlockTime, HeldBlockTimeCollector


def test_blocks_count_for_as_long_as_they_are_held_in_the_phase_of_the_time() -> None:
    held = HeldBlockTime()
    held.hold("a", "push", Instant(10.0))
    held.resize("a", 3, Instant(11.0))
    held.resize("a", 5, Instant(12.0))
    held.prefill_done("a", Instant(14.0))
    held.resize("a", 4, Instant(15.0))
    held.release("a", Instant(25.0))
    assert held.block_seconds["push", "computing"] == 3 * 1 + 5 * 2
    assert held.block_seconds["push", "waiting"] == 5 * 1 + 4 * 10
    assert len(held) == 0


def test_modes_are_apart_and_what_is_over_is_ignored() -> None:
    held = HeldBlockTime()
    for key, mode in (("a", "pull"), ("b", "pool")):
        held.hold(key, mode, Instant(0.0))
        held.resize(key, 2, Instant(0.0))
    held.release("a", Instant(1.0))
    for late in (Instant(2.0), Instant(3.0)):
        held.resize("a", 9, late)
        held.prefill_done("a", late)
        held.release("a", late)
    assert held.block_seconds["pull", "computing"] == 2
    assert sum(held.block_seconds.values()) == 2, "what is held still is not in the sums"
    held.release("b", Instant(4.0))
    assert held.block_seconds["pool", "computing"] == 8


def test_every_mode_and_phase_is_shown_from_the_start() -> None:
    held, registry = HeldBlockTime(), CollectorRegistry()
    registry.register(HeldBlockTimeCollector(lambda: held.block_seconds))
    name = "baton_handoff_held_block_seconds_total"
    for mode in ("push", "pull", "pool", "reference"):
        for phase in ("computing", "waiting"):
            assert registry.get_sample_value(name, {"mode": mode, "phase": phase}) == 0
    held.hold("a", "pull", Instant(0.0))
    held.resize("a", 2, Instant(0.0))
    held.release("a", Instant(1.5))
    assert registry.get_sample_value(name, {"mode": "pull", "phase": "computing"}) == 3
