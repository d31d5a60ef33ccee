"""Cases of the scheduler's side by name; `tests/property` has the orders of events."""

from __future__ import annotations

import pytest

from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import Instant
from baton.engines.vllm.handoff_schedule import (
    AwaitingBlocks,
    Ending,
    HandoffSchedule,
    Held,
    LocalCompute,
    Offered,
    Queued,
    Released,
    Scheduled,
)
from baton.engines.vllm.step_orders import Abort, Progress, Prompt, StepOrders
from baton.engines.vllm.tickets import Refusal
from baton.ids import Epoch, TicketId, WorkerId
from tests.tickets import issue

BLOCK_SIZE = 4
DONE = Ending("length", 1)
ENDS = (
    WorkerRef(WorkerId("p"), Epoch("0" * 32), "127.0.0.1:1"),
    WorkerRef(WorkerId("d"), Epoch("1" * 32), "127.0.0.1:2"),
)


ISSUE = issue(60)


def prompt(num_tokens: int) -> Prompt:
    ticket = Ticket(TicketId(b"t" * 16), "req-1", *ENDS, "push", ISSUE)
    return Prompt(ticket, b"h" * 32, num_tokens, Instant(0.0))


@pytest.fixture
def schedule() -> HandoffSchedule:
    return HandoffSchedule(BLOCK_SIZE)


def test_a_prompt_is_announced_chunk_by_chunk(schedule: HandoffSchedule) -> None:
    schedule.add("r", Queued(prompt(11)))
    assert schedule.step([], []).arrived == (prompt(11),)
    assert schedule.step([], []).arrived == ()
    first = schedule.step([Scheduled("r", [7, 8], 4, 6)], ())
    assert [offer.num_cached_tokens for offer in first.offers] == [4]
    assert first.progress == (Progress("r", 0, (7, 8), 6, is_last=False),)
    second = schedule.step([Scheduled("r", [9], 6, 11)], ())
    assert second.offers == ()
    assert second.progress == (Progress("r", 2, (9,), 11, is_last=True),)
    assert schedule.step([Scheduled("r", [10], 11, 12)], ()) == StepOrders()


def test_tokens_and_blocks_beyond_the_prompt_are_not_announced(schedule: HandoffSchedule) -> None:
    schedule.add("r", Queued(prompt(6)))
    orders = schedule.step([Scheduled("r", [7, 8, 9], 0, 9)], ())
    assert orders.progress == (Progress("r", 0, (7, 8), 6, is_last=True),)


@pytest.mark.parametrize(("num_cached", "missing"), [(0, 9), (4, 5), (8, 0)])
def test_all_that_is_not_cached_is_wanted_unless_only_the_last_token_is_missing(
    schedule: HandoffSchedule, num_cached: int, missing: int
) -> None:
    schedule.add("r", AwaitingBlocks(prompt(9)))
    assert schedule.count_missing("r", num_cached) == missing
    assert schedule.count_missing("r", num_cached) == missing
    assert len(schedule.step([], ()).queued) == 1
    assert schedule.step([], ()) == StepOrders()


def test_only_blocks_that_lack_tokens_are_expected(schedule: HandoffSchedule) -> None:
    schedule.add("r", AwaitingBlocks(prompt(9)))
    schedule.allocated("r", [3, 5, 6, 8], 5)
    (expect,) = schedule.step([], ()).expected
    assert (expect.start, expect.first_block, expect.blocks) == (4, 1, (5, 6))


def test_a_prompt_that_is_cached_is_declined_once(schedule: HandoffSchedule) -> None:
    schedule.add("r", AwaitingBlocks(prompt(9)))
    schedule.allocated("r", [3, 5, 6], 0)
    schedule.allocated("r", [3, 5, 6], 0)
    orders = schedule.step([Scheduled("r", [3, 5, 6], 8, 9)], ())
    assert len(orders.declined) == 1
    assert orders.expected == orders.started == ()


def test_a_failed_load_is_not_asked_for_again(schedule: HandoffSchedule) -> None:
    schedule.add("r", AwaitingBlocks(prompt(9)))
    schedule.allocated("r", [1, 2, 3], 9)
    schedule.step([], ())
    schedule.received("r")
    assert schedule.count_missing("r", 0) == 0
    schedule.allocated("r", [1, 2, 3], 0)
    orders = schedule.step([Scheduled("r", [1, 2, 3], 0, 9)], ())
    assert orders.declined == orders.expected == ()
    assert orders.started == ("r",)


def test_a_preempted_prefill_is_not_offered_again(schedule: HandoffSchedule) -> None:
    schedule.add("r", Queued(prompt(9)))
    schedule.step([Scheduled("r", [1], 0, 4)], ())
    orders = schedule.step([], ["r", "another"])
    assert orders.preempted == ("r",)
    again = schedule.step([Scheduled("r", [4, 5, 6], 0, 9)], ())
    assert again.offers == again.progress == ()
    result = schedule.finish("r", DONE)
    assert isinstance(result, Released)
    assert isinstance(result.report, Refusal)
    assert result.report.code == "handoff_failed"


def test_a_held_prefill_that_was_preempted_before_it_finished_has_no_blocks_to_be_read(
    schedule: HandoffSchedule,
) -> None:
    """As when vLLM resets its prefix cache, running requests included, and a client leaves then."""
    schedule.add("r", Queued(prompt(4)))
    schedule.step([Scheduled("r", [1], 0, 4)], ())
    assert schedule.finish("r", DONE) == Held(Offered())
    orders = schedule.step([], ["r"])
    assert (orders.preempted, orders.preempted_while_held) == ((), ("r",))
    assert schedule.step([], ["r"]).preempted_while_held == ()


def test_a_finished_prefill_holds_its_blocks(schedule: HandoffSchedule) -> None:
    schedule.add("r", Queued(prompt(4)))
    schedule.step([Scheduled("r", [1], 0, 4)], ())
    assert schedule.finish("r", DONE) == Held(Offered())
    assert schedule.step([], ()).aborted == ()


def test_a_prefill_that_failed_still_holds_its_blocks_until_the_worker_says_so(
    schedule: HandoffSchedule,
) -> None:
    schedule.add("r", Queued(prompt(4)))
    schedule.step([Scheduled("r", [1], 0, 4)], ())
    schedule.send_failed("r", "the peer is gone")
    assert schedule.finish("r", DONE) == Held(Refusal("handoff_failed", "the peer is gone"))


def test_a_prefill_that_ends_early_after_one_rank_failed_ends_on_the_others(
    schedule: HandoffSchedule,
) -> None:
    """They have not failed, and never get the rest of the prompt: their blocks would be held."""
    schedule.add("r", Queued(prompt(8)))
    schedule.step([Scheduled("r", [1], 0, 4)], ())
    schedule.send_failed("r", "the peer is gone")
    finished = schedule.finish("r", Ending("cancelled", 0))
    assert finished == Held(Refusal("handoff_failed", "the peer is gone"))
    assert schedule.step([], ()).aborted == (Abort("r", "the peer is gone"),)


def test_a_refused_request_says_why(schedule: HandoffSchedule) -> None:
    refusal = Refusal("stale_ticket", "an earlier life")
    schedule.add("r", LocalCompute(refusal))
    assert schedule.count_missing("r", 0) == 0
    assert schedule.finish("r", DONE) == Released(refusal)


def test_a_prefill_that_was_never_begun_is_withdrawn(schedule: HandoffSchedule) -> None:
    schedule.add("r", Queued(prompt(4)))
    assert isinstance(schedule.finish("r", Ending("cancelled", 0)), Released)
    assert len(schedule.step([], ()).withdrawn) == 1
    assert len(schedule) == 0
