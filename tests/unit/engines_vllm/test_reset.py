"""vLLM resets its caches, as it does before weights are replaced: KV from before is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.vllm.admission import RESET_REASON
from baton.engines.vllm.prefix_admission import IDLE_S
from baton.engines.vllm.step_orders import Occupancy, PrefixOrders
from tests.unit.engines_vllm.test_adapters import make_files
from tests.unit.engines_vllm.test_admission import (
    Blocks,
    admission,
    clock,
    make_admission,
    make_lora,
    receiving,
    request,
    sending,
    step,
)
from tests.unit.engines_vllm.test_prefix_admission import (
    Pool,
    asking,
    plan,
    pool_fixture,
    report,
    stored_fixture,
)

if TYPE_CHECKING:
    from pathlib import Path

    from baton.engines.vllm.admission import Admission
    from baton.kv.identity import Adapter
    from baton.testing.clocks import ManualClock

__all__ = ["admission", "clock", "pool_fixture", "stored_fixture"]

REFUSED = {"baton": {"status": "refused", "code": "unsupported_request", "reason": RESET_REASON}}


def keep(admission: Admission, name: str, **changes: Any) -> Adapter | None:
    """What a request that ends is kept as."""
    admission.finish(asking(name, **changes), range(10, 14))
    orders = plan(admission)
    assert orders is not None
    (kept,) = orders.keeps
    report(admission, kept=(name, name))
    return kept.adapter


def look_up(admission: Admission, name: str, **changes: Any) -> Adapter | None:
    """As what a prompt is looked for."""
    assert admission.count_missing(asking(name, **changes), 0) is None
    orders = plan(admission)
    assert orders is not None
    (lookup,) = orders.lookups
    return lookup.adapter


def test_handoffs_are_refused(admission: Admission) -> None:
    admission.reset()
    prefill, decode = request(sending(), "p"), request(receiving(), "d")
    assert admission.count_missing(decode, 0) == 0
    assert admission.step(step(new=(("p", [1, 2, 3], 0, 9),))).offers == ()
    assert admission.finish(prefill) == (False, REFUSED)
    assert admission.finish(decode) == (False, None)


def test_the_gateway_gets_to_know_it_with_the_next_step(admission: Admission) -> None:
    """Which is not asked for: vLLM refuses to release its KV's memory while there is work."""
    admission.bind(Blocks())
    admission.step(step())
    admission.reset()
    assert not admission.needs_step
    told = Occupancy(0, 10, 10, 4, why_no_handoffs=RESET_REASON)
    assert admission.step(step()).occupancy == told
    admission.reset()
    assert admission.step(step()).occupancy is None, "it was told"


def test_a_reset_that_vllm_has_refused_changes_nothing(admission: Admission) -> None:
    """vLLM asks the connector also after its own has failed, where it was to preempt nothing."""
    blocks = Blocks()
    admission.bind(blocks)
    blocks.num_free -= 1
    assert not admission.reset()
    assert admission.count_missing(request(receiving(), "d"), 0) == 9
    blocks.num_free += 1
    assert admission.reset()
    assert admission.count_missing(request(receiving(), "late"), 0) == 0


def test_handoffs_of_requests_that_wait_end(admission: Admission) -> None:
    """Their prompts have the hashes of before."""
    prefill, decode = request(sending("pull"), "p"), request(receiving(), "d")
    admission.add(prefill)
    assert admission.count_missing(decode, 0) == 9
    admission.reset()
    assert admission.count_missing(decode, 0) == 0
    orders = admission.step(step(new=(("p", [1, 2, 3], 0, 9), ("d", [4, 5, 6], 0, 9))))
    assert [each.reason for each in orders.withdrawn] == [RESET_REASON]
    assert [each.reason for each in orders.declined] == [RESET_REASON]
    assert orders.offers == orders.expected == ()
    held, answer = admission.finish(prefill)
    assert not held
    assert answer == {"baton": {**REFUSED["baton"], "code": "handoff_failed"}}
    admission.finish(decode)
    assert [each.request for each in admission.step(step()).finished] == ["d"]


def test_handoffs_of_preempted_prompts_end_before_their_memory_may_be_unmapped(
    clock: ManualClock,
) -> None:
    """`/sleep` with `mode=keep` preempts what runs, resets, and unmaps: without a step between."""
    admission = make_admission(clock, may_unmap_kv=True)
    admission.add(request(sending(), "p"))
    assert [each.request for each in admission.step(step(new=(("p", [1], 0, 4),))).offers] == ["p"]
    assert not admission.reset()
    assert admission.needs_step
    assert admission.step(step(preempted={"p"})).preempted == ("p",)
    assert not admission.needs_step
    assert admission.reset()
    assert admission.count_missing(request(receiving(), "d"), 0) == 0


def test_a_server_that_keeps_its_memory_resets_at_once(admission: Admission) -> None:
    admission.add(request(sending(), "p"))
    admission.step(step(new=(("p", [1], 0, 4),)))
    assert admission.reset()
    assert not admission.needs_step


@pytest.mark.parametrize("num_answers", [0, 1, 2])
def test_what_was_found_before_is_not_loaded(stored: Admission, num_answers: int) -> None:
    asked = asking()
    assert look_up(stored, "r") is None
    report(stored, found=(("r", 16),) * num_answers, read=("r",) * num_answers)
    stored.reset()
    report(stored, found=(("r", 16),) * (2 - num_answers))
    assert stored.count_missing(asked, 0) == 0
    assert not stored.is_read(asked)
    assert plan(stored) == PrefixOrders(released=("r",))


def test_what_was_kept_before_is_not_found(stored: Admission, tmp_path: Path) -> None:
    folder = make_files(tmp_path / "a")
    makers: tuple[dict[str, Any], ...] = ({}, {"lora_request": make_lora(folder)})
    found: list[Adapter | None] = []
    for number in range(3):
        for which, changes in enumerate(makers):
            kept = keep(stored, f"k{number}{which}", **changes)
            assert kept == look_up(stored, f"l{number}{which}", **changes)
            found.append(kept)
            report(stored, found=((f"l{number}{which}", 0),) * 2)
        stored.reset()
    plain, adapted, *later = found
    assert plain is None
    assert adapted is not None
    assert adapted.name == "sql"
    digests = {each.digest for each in (adapted, *later) if each is not None}
    names = {each.name for each in (adapted, *later) if each is not None}
    assert len(digests) == len(names) == 5, "each reset has its own, which no other server has"


def test_an_idle_server_makes_a_step_to_free_what_was_kept(
    stored: Admission, pool: Pool, clock: ManualClock
) -> None:
    """Else vLLM could neither reset its caches nor sleep: it refuses while blocks are in use."""
    stored.update_from_workers(None, None, None)
    plan(stored)
    clock.advance(60)
    assert not stored.needs_step
    stored.finish(asking(), range(10, 14))
    assert not stored.needs_step, "no copy is done yet"
    plan(stored)
    clock.advance(IDLE_S)
    assert stored.needs_step
    plan(stored)
    assert not stored.needs_step, "one step, not one after another"
    clock.advance(IDLE_S)
    assert stored.needs_step
    report(stored, kept=("r", "r"))
    assert not stored.needs_step
    assert set(pool.references) == {1}
