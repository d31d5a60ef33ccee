"""Prefill requests, decode requests and what becomes of their blocks, turn by turn."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("transformers")

from baton.engines.interface import DecodeRequest, FinishReason, NewToken, PrefillRequest
from baton.engines.lookup_cost import LookupCost
from baton.errors import EngineError, HandoffError, OverloadedError, TicketError
from baton.handoff.interface import (
    BlocksQuiescent,
    ExportReleased,
    KVExported,
    KVFailed,
    KVLanded,
    KVSent,
    PrefixFound,
    SampledToken,
    SendFailed,
    TokenLogprob,
)
from baton.telemetry.trace import Stamp
from baton.transfer.region import view_pages
from baton.worker.metrics import EngineCollector
from tests.unit.engines.harness import (
    VOCAB_SIZE,
    Driver,
    RecordingHandoff,
    make_prompt,
    make_ticket,
    tiny_llama,
)
from tests.unit.engines.test_engine_prefixes import RecordingStore

PROMPT = make_prompt(40)
TICKET = make_ticket()
LOST = HandoffError("the peer left", stage="landing")


def drive(**options: object) -> tuple[Driver, RecordingHandoff]:
    handoff = RecordingHandoff()
    return Driver(tiny_llama(), handoff, **{"block_size": 8, **options}), handoff


def colocated_answer() -> list[int]:
    driver, _ = drive()
    driver.submit("r", PROMPT)
    driver.run()
    return driver.tokens("r")


def test_a_prefill_leg_reports_each_layer_of_each_chunk() -> None:
    driver, handoff = drive(max_batch_tokens=16)
    driver.submit("p", PROMPT, PrefillRequest(TICKET))
    driver.step(3)
    assert handoff.calls == ["start_send", "prefill_done"]
    assert handoff.ready == [(TICKET.id, stop, layer) for stop in (16, 32, 40) for layer in (0, 1)]
    (order,) = handoff.sends
    assert (order.num_tokens, order.num_ready_tokens, len(order.blocks.blocks)) == (40, 0, 5)


def test_each_step_says_which_prompts_are_not_computed_yet() -> None:
    driver, handoff = drive(max_batch_tokens=16)
    first, second, third = (make_ticket(number) for number in (1, 2, 3))
    driver.submit("p", PROMPT, PrefillRequest(first))
    driver.submit("q", make_prompt(10, seed=1), PrefillRequest(second))
    driver.submit("r", make_prompt(10, seed=2), PrefillRequest(third))
    driver.step()
    driver.loop.cancel("r")
    driver.step(3)
    queue = (first.id, second.id)
    assert handoff.uncomputed == [(*queue, third.id), queue, queue, (second.id,)]
    driver.step()
    assert len(handoff.uncomputed) == 4, "nothing was computed, and it said so"


def test_a_prefill_leg_answers_once_when_its_kv_was_sent() -> None:
    driver, handoff = drive()
    driver.submit("p", PROMPT, PrefillRequest(TICKET))
    driver.run()
    assert driver.updates == []
    assert driver.loop.stats().num_free_blocks == 64 - 5
    handoff.events = [KVSent(TICKET.id)]
    driver.step()
    token = SampledToken(colocated_answer()[0])
    assert driver.updates == [NewToken("p", token, 0, FinishReason.LENGTH)]
    assert handoff.first_tokens == {TICKET.id: token}
    driver.check_all_blocks_are_free()


def test_a_prefill_leg_offers_its_prefix_hit_as_ready() -> None:
    driver, handoff = drive()
    driver.submit("first", PROMPT)
    driver.run()
    driver.submit("p", PROMPT, PrefillRequest(TICKET))
    driver.run()
    assert handoff.sends[0].num_ready_tokens == 32
    assert handoff.ready == [(TICKET.id, 40, 0), (TICKET.id, 40, 1)]


def test_a_prefix_that_is_cached_is_offered_ahead_of_prompts_that_wait() -> None:
    ticket = msgspec.structs.replace(TICKET, num_prefix_tokens=32)
    driver, handoff = drive(max_batch_tokens=16)
    driver.submit("first", PROMPT)
    driver.run()
    driver.submit("long", make_prompt(200, seed=1))
    driver.submit("p", PROMPT[:32], PrefillRequest(ticket))
    driver.step()
    assert handoff.calls == ["start_send", "prefill_done"]
    assert (handoff.sends[0].num_tokens, handoff.sends[0].num_ready_tokens) == (32, 32)
    assert handoff.first_tokens == {ticket.id: None}
    handoff.events = [KVSent(ticket.id)]
    driver.step()
    assert driver.finish("p") is FinishReason.LENGTH
    assert driver.finish("long") is None, "it is still computed"
    driver.run()
    driver.check_all_blocks_are_free()


def test_a_prefix_that_is_not_cached_waits_its_turn() -> None:
    ticket = msgspec.structs.replace(TICKET, num_prefix_tokens=32)
    driver, handoff = drive(max_batch_tokens=16)
    driver.submit("long", make_prompt(200, seed=1))
    driver.submit("p", PROMPT[:32], PrefillRequest(ticket))
    driver.step()
    assert handoff.sends == []
    driver.run()
    assert handoff.ready[-1] == (ticket.id, 32, 1)


def test_a_prefill_leg_whose_handoff_fails_stops_computing() -> None:
    driver, handoff = drive(max_batch_tokens=16)
    driver.submit("p", PROMPT, PrefillRequest(TICKET))
    driver.step()
    handoff.events = [SendFailed(TICKET.id, LOST)]
    driver.run()
    assert driver.failure("p") is LOST
    assert len(handoff.ready) == 2
    driver.check_all_blocks_are_free()


@pytest.mark.parametrize("event", [KVSent(TICKET.id), SendFailed(TICKET.id, LOST)])
def test_a_cancelled_prefill_leg_keeps_its_blocks_until_its_handoff_ends(
    event: KVSent | SendFailed,
) -> None:
    driver, handoff = drive()
    driver.submit("p", PROMPT, PrefillRequest(TICKET))
    driver.run()
    driver.loop.cancel("p")
    driver.step()
    assert handoff.calls == ["start_send", "prefill_done", "abort"]
    assert driver.loop.stats().num_free_blocks == 64 - 5
    handoff.events = [event]
    driver.step()
    assert driver.updates == []
    driver.check_all_blocks_are_free()


def held_block_s(driver: Driver, mode: str) -> tuple[float, float]:
    """Block-seconds of computing and of waiting; nothing else was counted."""
    sums = driver.loop.stats().held_block_s
    found = sums[mode, "computing"], sums[mode, "waiting"]
    assert sum(sums.values()) == sum(found)
    return found


@pytest.mark.parametrize("event", [KVSent(TICKET.id), SendFailed(TICKET.id, LOST)])
def test_blocks_of_a_prefill_leg_are_counted_until_its_handoff_ends(
    event: KVSent | SendFailed,
) -> None:
    driver, handoff = drive(max_batch_tokens=16)
    driver.submit("p", PROMPT, PrefillRequest(TICKET))
    for _ in range(3):
        driver.step()
        driver.clock.advance(2.0)
    driver.step()
    handoff.events = [event]
    driver.clock.advance(3.0)
    driver.step()
    driver.clock.advance(50.0)
    driver.step()
    assert held_block_s(driver, "push") == (5 * 4.0, 5 * 5.0)
    driver.check_all_blocks_are_free()


def test_lent_blocks_are_counted_until_the_loan_ends() -> None:
    driver, handoff = drive()
    ticket = msgspec.structs.replace(TICKET, mode="reference")
    driver.submit("p", PROMPT, PrefillRequest(ticket))
    driver.run()
    lent = tuple(int(block) for block in handoff.sends[0].blocks.blocks[:4])
    driver.clock.advance(1.0)
    handoff.events = [KVExported(ticket.id, lent)]
    driver.step()
    driver.clock.advance(10.0)
    handoff.events = [ExportReleased(ticket.id)]
    driver.step()
    assert held_block_s(driver, "reference") == (0.0, 5 * 1.0 + 4 * 10.0)
    driver.check_all_blocks_are_free()


def test_kv_sent_before_prefill_is_done_is_an_error_not_an_answer() -> None:
    driver, handoff = drive(max_batch_tokens=16)
    driver.submit("p", PROMPT, PrefillRequest(TICKET))
    driver.step()
    handoff.events = [KVSent(TICKET.id)]
    driver.run()
    assert isinstance(driver.failure("p"), EngineError)
    driver.check_all_blocks_are_free()


def test_a_decode_leg_waits_without_computing() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    assert not driver.loop.step()
    (order,) = handoff.receives
    assert (order.start, order.num_tokens, order.blocks.first) == (0, 40, 0)
    stats = driver.loop.stats()
    assert (stats.num_awaiting_kv, stats.num_reserved_blocks) == (1, 5)
    assert list(driver.traces["d"].stamps) == [Stamp.ADMITTED, Stamp.PAGES_RESERVED]


def test_a_decode_leg_asks_only_for_what_it_lacks() -> None:
    driver, handoff = drive()
    driver.submit("first", PROMPT[:20])
    driver.run()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    (order,) = handoff.receives
    assert (order.start, order.num_tokens) == (16, 40)
    assert (order.blocks.first, len(order.blocks.blocks)) == (2, 3)


def test_a_decode_leg_that_lacks_little_declines() -> None:
    driver, handoff = drive(min_handoff_tokens=9)
    driver.submit("first", PROMPT)
    driver.run()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.run()
    assert handoff.calls == ["decline"]
    assert driver.tokens("d") == driver.tokens("first")
    assert driver.traces["d"].num_cached_tokens == 32


def test_a_landed_first_token_is_an_answer_at_once() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET), max_tokens=1)
    driver.step()
    handoff.events = [KVLanded(TICKET.id, SampledToken(7))]
    driver.step()
    assert (driver.tokens("d"), driver.finish("d")) == ([7], FinishReason.LENGTH)
    assert driver.traces["d"].num_received_tokens == 40
    driver.check_all_blocks_are_free()


@pytest.mark.parametrize(
    "token",
    [
        SampledToken(VOCAB_SIZE),
        SampledToken(2**31 - 1),
        SampledToken(7, -0.5, (TokenLogprob(VOCAB_SIZE, -0.5),)),
    ],
)
def test_a_first_token_outside_the_vocabulary_is_computed_here(token: SampledToken) -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET), max_tokens=1)
    driver.step()
    handoff.events = [KVLanded(TICKET.id, token)]
    driver.step()
    (computed,) = driver.tokens("d")
    assert 0 <= computed < VOCAB_SIZE
    assert driver.finish("d") is FinishReason.LENGTH
    driver.check_all_blocks_are_free()


def test_a_handoff_that_fails_in_the_engine_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, handoff = drive()

    def broken(*_: object) -> None:
        raise OverflowError("what nobody thought of")

    monkeypatch.setattr(type(driver.loop._pages), "load_blocks", broken)
    driver.submit("other", PROMPT)
    driver.submit("d", PROMPT, DecodeRequest(TICKET), max_tokens=1)
    driver.step()
    handoff.events = [KVLanded(TICKET.id, SampledToken(7))]
    driver.step()
    assert "the handoff failed" in str(driver.failure("d"))
    driver.run()
    assert driver.finish("other") is FinishReason.LENGTH
    driver.check_all_blocks_are_free()


def leg_without_first_token(num_prompt_tokens: int = 40, **sampling: object) -> Driver:
    """A decode leg whose KV an engine of the same weights computed; no first token came with it."""
    prefill, _ = drive()
    prefill.submit("p", PROMPT[:num_prompt_tokens], PrefillRequest(TICKET))
    prefill.run()
    (source,) = prefill.handoff.sends
    decode, handoff = drive()
    decode.submit("d", PROMPT[:num_prompt_tokens], DecodeRequest(TICKET), **sampling)
    decode.step()
    (target,) = handoff.receives
    for layer in range(decode.engine.info.layout.num_layers):
        theirs, ours = (
            view_pages(driver.engine.region.memory, driver.engine.region.arrays[layer])
            for driver in (prefill, decode)
        )
        ours[target.blocks.blocks] = theirs[source.blocks.blocks]
    handoff.events = [KVLanded(TICKET.id, None)]
    decode.step()
    assert len(decode.tokens("d")) == 1, "one turn computes the last prompt token, and samples"
    return decode


def test_a_landed_first_token_does_not_wait_for_the_step_that_follows_it() -> None:
    driver, handoff = drive()
    deliveries: list[list[str]] = []
    driver.loop = driver.engine.build_loop(
        lambda updates: deliveries.append([type(update).__name__ for update in updates]), handoff
    )
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    handoff.events = [KVLanded(TICKET.id, SampledToken(5))]
    driver.step()
    assert deliveries == [["NewToken"], ["NewToken"]]


@pytest.mark.parametrize("num_prompt_tokens", [33, 39, 40])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.0, "seed": 11}]
)
def test_without_a_first_token_the_answer_is_that_of_one_engine_alone(
    num_prompt_tokens: int, sampling: dict[str, object]
) -> None:
    alone, _ = drive()
    alone.submit("r", PROMPT[:num_prompt_tokens], **sampling)
    alone.run()
    decode = leg_without_first_token(num_prompt_tokens, **sampling)
    decode.run()
    assert decode.tokens("d") == alone.tokens("r")
    trace = decode.traces["d"]
    assert trace.num_received_tokens == num_prompt_tokens
    assert not {Stamp.PREFILL_STARTED, Stamp.FIRST_LAYER_READY, Stamp.PREFILL_DONE} & set(
        trace.stamps
    )
    assert trace.stamps[Stamp.KV_READY] <= trace.stamps[Stamp.DECODE_SCHEDULED]
    assert trace.stamps[Stamp.DECODE_SCHEDULED] <= trace.stamps[Stamp.FIRST_TOKEN]
    decode.check_all_blocks_are_free()


def test_without_a_first_token_the_prompt_is_cached_as_if_it_was_computed() -> None:
    driver = leg_without_first_token()
    driver.run()
    driver.submit("again", PROMPT)
    driver.run()
    assert driver.traces["again"].num_cached_tokens == 32
    assert driver.tokens("again") == driver.tokens("d")


def test_a_landed_end_token_ends_the_answer_and_is_hidden() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET), stop_token_ids=(7,))
    driver.step()
    handoff.events = [KVLanded(TICKET.id, SampledToken(7))]
    driver.step()
    assert driver.updates == [NewToken("d", SampledToken(7), 0, FinishReason.STOP, hidden=True)]


def test_failed_kv_is_computed_here_in_other_blocks() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    handoff.events = [KVFailed(TICKET.id, LOST)]
    driver.run()
    assert driver.tokens("d") == colocated_answer()
    assert driver.traces["d"].fallbacks == ["computed locally: the peer left"]
    stats = driver.loop.stats()
    assert (stats.num_quarantined_blocks, stats.num_free_blocks) == (5, 59)
    handoff.events = [BlocksQuiescent(TICKET.id)]
    driver.step()
    driver.check_all_blocks_are_free()


def test_failed_kv_waits_for_blocks_while_its_own_are_quarantined() -> None:
    driver, handoff = drive(num_blocks=7)
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    handoff.events = [KVFailed(TICKET.id, LOST)]
    driver.run()
    assert (driver.tokens("d"), driver.loop.stats().num_waiting) == ([], 1)
    handoff.events = [BlocksQuiescent(TICKET.id)]
    driver.run()
    assert driver.tokens("d") == colocated_answer()


def count_by_source(driver: Driver) -> dict[str, float]:
    families = EngineCollector(driver.loop.stats).collect()
    samples = [sample for family in families for sample in family.samples]
    name = "baton_worker_prompt_tokens_total"
    return {each.labels["source"]: each.value for each in samples if each.name == name}


def test_a_prompt_that_is_received_never_counts_as_computed() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    assert count_by_source(driver) == {"computed": 0, "cached": 0, "received": 0}
    handoff.events = [KVLanded(TICKET.id, None)]  # its last token is computed here once more
    driver.run()
    assert count_by_source(driver) == {"computed": 0, "cached": 0, "received": 40}


def test_tokens_that_were_cached_and_are_loaded_after_they_are_gone_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LookupCost, "count_answered_in_time", lambda *_: 24)
    handoff, store = RecordingHandoff(), RecordingStore()
    handoff.prefixes = store
    driver = Driver(tiny_llama(), handoff, block_size=8, num_blocks=7, max_kept_share=0)
    driver.submit("first", PROMPT[:17], max_tokens=1)
    driver.run()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    assert count_by_source(driver) == {"computed": 17, "cached": 16, "received": 0}
    handoff.events = [KVFailed(TICKET.id, LOST), BlocksQuiescent(TICKET.id)]
    driver.step()
    (asked,) = store.asked
    for number in (1, 2, 3):
        driver.submit(f"evicts {number}", make_prompt(23, seed=number), max_tokens=1)
        driver.run()
    handoff.events = [PrefixFound(asked, 32, 0.0)]
    driver.step()
    assert [load.start for load in store.loads] == [0]
    handoff.events = [KVLanded(asked, None, 32)]
    driver.run()
    trace = driver.traces["d"]
    assert (trace.num_cached_tokens, trace.num_loaded_tokens) == (32, 32)
    assert count_by_source(driver) == {"computed": 17 + 3 * 23 + 8, "cached": 32, "received": 0}


def test_tokens_that_were_received_and_are_loaded_after_a_preemption_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LookupCost, "count_answered_in_time", lambda *_: 8)
    handoff, store = RecordingHandoff(), RecordingStore()
    handoff.prefixes, store.block_size = store, 8
    sizes = {"block_size": 8, "num_blocks": 8, "max_batch_tokens": 2, "max_kept_share": 0}
    driver = Driver(tiny_llama(), handoff, **sizes)
    first, second, third = (make_ticket(number) for number in (1, 2, 3))
    for name, ticket, num_tokens in (("a", first, 8), ("b", second, 8), ("d", third, 40)):
        driver.submit(name, make_prompt(num_tokens), DecodeRequest(ticket), max_tokens=12)
        driver.step()
    # The two older ones take every step's tokens, and soon the blocks of the third.
    handoff.events = [KVLanded(ticket.id, SampledToken(7)) for ticket in (first, second)]
    handoff.events += [KVLanded(third.id, None)]
    driver.run()
    assert (driver.loop.stats().num_preemptions, driver.tokens("d")) == (1, [])
    (asked,) = store.asked
    handoff.events = [PrefixFound(asked, 40, 0.0)]
    driver.step()
    assert [load.start for load in store.loads] == [24]
    handoff.events = [KVLanded(asked, None, 32)]
    driver.run()
    assert len(driver.tokens("d")) == 12
    assert count_by_source(driver) == {"computed": 0, "cached": 0, "received": 8 + 8 + 40}


def test_a_prompt_whose_request_ends_while_it_waits_for_kv_does_not_count() -> None:
    driver, _ = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    driver.loop.cancel("d")
    assert count_by_source(driver) == {"computed": 0, "cached": 0, "received": 0}


def test_a_prompt_counts_as_computed_where_no_kv_came_and_as_cached_afterwards() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    handoff.events = [KVFailed(TICKET.id, LOST), BlocksQuiescent(TICKET.id)]
    driver.run()
    assert count_by_source(driver) == {"computed": 40, "cached": 0, "received": 0}
    driver.submit("again", PROMPT)
    driver.run()
    assert count_by_source(driver) == {"computed": 48, "cached": 32, "received": 0}


def test_a_cancelled_decode_leg_leaves_its_blocks_in_quarantine() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    driver.loop.cancel("d")
    driver.step()
    assert handoff.calls == ["start_receive", "abort"]
    assert driver.loop.stats().num_quarantined_blocks == 5
    handoff.events = [BlocksQuiescent(TICKET.id)]
    driver.step()
    driver.check_all_blocks_are_free()


def test_kv_that_lands_after_a_cancel_frees_its_blocks() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    driver.loop.cancel("d")
    handoff.events = [KVLanded(TICKET.id, SampledToken(7))]
    driver.step()
    assert driver.updates == []
    driver.check_all_blocks_are_free()


def test_a_decode_leg_that_leaves_the_queue_tells_its_prefill_worker() -> None:
    driver, handoff = drive(max_num_seqs=1)
    driver.submit("busy", PROMPT)
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    driver.loop.cancel("d")
    assert handoff.calls == ["decline"]


def test_a_ticket_in_use_is_refused_and_disturbs_nobody() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET))
    driver.step()
    driver.submit("replay", PROMPT, DecodeRequest(TICKET))
    driver.step()
    assert isinstance(driver.failure("replay"), TicketError)
    handoff.events = [KVLanded(TICKET.id, SampledToken(7))]
    driver.step()
    assert driver.tokens("d")[0] == 7


def test_decode_legs_wait_for_blocks_in_order() -> None:
    driver, handoff = drive(num_blocks=7)
    for number, length in ((1, 40), (2, 40), (3, 8)):
        driver.submit(f"d{number}", make_prompt(length, number), DecodeRequest(make_ticket(number)))
    driver.step()
    assert [order.ticket.id for order in handoff.receives] == [make_ticket(1).id]
    handoff.events = [KVLanded(make_ticket(1).id, SampledToken(7))]
    driver.run()
    assert [order.ticket.id for order in handoff.receives][1:] == [
        make_ticket(2).id,
        make_ticket(3).id,
    ]


def test_a_passed_deadline_fails_the_request_and_aborts_its_handoff() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(TICKET), timeout_s=5.0)
    driver.step()
    driver.clock.advance(6.0)
    driver.step()
    assert isinstance(driver.failure("d"), EngineError)
    assert handoff.calls == ["start_receive", "abort"]


PULLED = msgspec.structs.replace(TICKET, mode="pull")


def test_a_pulled_prompt_is_answered_when_it_is_held_and_freed_when_it_was_taken() -> None:
    driver, handoff = drive()
    driver.submit("p", PROMPT, PrefillRequest(PULLED))
    driver.run()
    token = SampledToken(colocated_answer()[0])
    assert driver.updates == [NewToken("p", token, 0, FinishReason.LENGTH)]
    assert handoff.calls == ["start_send", "prefill_done"], (
        "an answered prompt's handoff was aborted"
    )
    stats = driver.loop.stats()
    assert (stats.num_free_blocks, stats.num_held_blocks) == (64 - 5, 5)
    handoff.events = [KVSent(TICKET.id)]
    driver.step()
    assert len(driver.updates) == 1
    driver.check_all_blocks_are_free()
    assert driver.loop.stats().num_held_blocks == 0


def test_a_pulled_prompt_whose_lease_ran_out_is_freed_and_fails_nobody() -> None:
    driver, handoff = drive()
    driver.submit("p", PROMPT, PrefillRequest(PULLED))
    driver.run()
    handoff.events = [SendFailed(TICKET.id, HandoffError("over", stage="lease"))]
    driver.step()
    assert driver.failure("p") is None
    driver.check_all_blocks_are_free()


def test_a_held_prompts_ticket_cannot_be_used_again() -> None:
    driver, _ = drive()
    driver.submit("p", PROMPT, PrefillRequest(PULLED))
    driver.run()
    driver.submit("again", PROMPT, PrefillRequest(PULLED))
    driver.step()
    assert isinstance(driver.failure("again"), TicketError)


def test_prompts_that_wait_to_be_pulled_hold_a_part_of_the_blocks_only() -> None:
    driver, handoff = drive(max_held_share=0.2)  # 12 of 64 blocks; a prompt has 5
    tickets = [msgspec.structs.replace(make_ticket(n), mode="pull") for n in (1, 2, 3)]
    for n, ticket in enumerate(tickets):
        driver.submit(f"p{n}", make_prompt(40, seed=n), PrefillRequest(ticket))
    driver.run()
    assert [driver.finish(f"p{n}") for n in (0, 1)] == [FinishReason.LENGTH] * 2
    assert isinstance(driver.failure("p2"), OverloadedError)
    assert driver.loop.stats().num_held_blocks == 10
    pushed = make_ticket(4)
    driver.submit("pushed", make_prompt(40, seed=4), PrefillRequest(pushed))
    driver.run()
    assert len(handoff.sends) == 3, "push is no prompt that waits"
    handoff.events = [KVSent(tickets[0].id)]
    driver.step()
    driver.submit(
        "p3",
        make_prompt(40, seed=5),
        PrefillRequest(msgspec.structs.replace(make_ticket(5), mode="pull")),
    )
    driver.run()
    assert driver.finish("p3") is FinishReason.LENGTH


def test_a_decode_leg_keeps_its_lease_from_its_first_moment_in_the_queue() -> None:
    driver, handoff = drive(num_blocks=8, max_num_seqs=1)
    driver.submit("busy", make_prompt(40, seed=9), max_tokens=16)
    driver.step()
    driver.submit("d", PROMPT, DecodeRequest(PULLED))
    driver.step()
    assert handoff.kept == [TICKET.id]
    assert handoff.calls == [], "it asks before it has room"
    assert driver.loop.stats().num_reserved_blocks == 0
    driver.run()
    assert handoff.calls == ["start_receive"]


EARLY = msgspec.structs.replace(TICKET, first_token_early=True)


def test_an_early_first_token_does_not_wait_for_the_handoff_and_says_whether_it_is_the_last() -> (
    None
):
    for max_tokens, finish in ((8, None), (1, FinishReason.LENGTH)):
        driver, handoff = drive()
        driver.submit("p", PROMPT, PrefillRequest(EARLY), max_tokens=max_tokens)
        driver.run()
        token = SampledToken(colocated_answer()[0])
        assert driver.updates == [NewToken("p", token, 0, finish)]
        assert handoff.calls == ["start_send", "prefill_done"]
        assert driver.loop.stats().num_sending == 1, "a worker that drains waits for it"
        handoff.events = [KVSent(TICKET.id)]
        driver.step()
        assert driver.loop.stats().num_sending == 0
        assert len(driver.updates) == 1
        driver.check_all_blocks_are_free()


def test_decode_goes_on_from_the_token_that_the_client_has() -> None:
    driver, handoff = drive()
    said = SampledToken(7, -0.5)
    assert driver.engine.commit_first_token(TICKET.id, said) == said
    driver.submit("d", PROMPT, DecodeRequest(EARLY), num_logprobs=0)
    driver.step()
    handoff.events = [KVFailed(TICKET.id, LOST), BlocksQuiescent(TICKET.id)]
    driver.run()
    assert colocated_answer()[0] != 7
    first = driver.updates[0]
    assert isinstance(first, NewToken)
    assert first.token == said
    assert len(driver.tokens("d")) == 8
    other = driver.engine.commit_first_token(TICKET.id, SampledToken(9))
    assert other == said, "it was said before"


def test_a_token_that_decode_has_said_is_not_replaced() -> None:
    driver, handoff = drive()
    driver.submit("d", PROMPT, DecodeRequest(EARLY))
    driver.step()
    handoff.events = [KVLanded(TICKET.id, SampledToken(5))]
    driver.step()
    assert driver.engine.commit_first_token(TICKET.id, SampledToken(7)) == SampledToken(5)
    assert driver.tokens("d")[0] == 5
