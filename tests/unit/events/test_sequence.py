"""The cases by name; tests/property/test_events_sequence.py mixes them."""

from __future__ import annotations

import pytest

from baton.clock import UnixTime
from baton.events.blocks import EventBatch, Lost, NumberedBatch, Restarted
from baton.events.sequence import MAX_ATTEMPTS, Deliver, ReplayCause, RequestReplay, Sequencer

BATCH = EventBatch(UnixTime(0), (), 0, 0)


def message(seq, life=0):
    return NumberedBatch(seq, 1_000 * life + seq, BATCH)


def delivered(*seqs, life=0):
    return [Deliver(message(seq, life)) for seq in seqs]


@pytest.fixture
def sequencer():
    """Has delivered 0, 1 and 2, and is in sync."""
    sequencer = Sequencer(max_held=4, num_remembered=8)
    sequencer.connected()
    sequencer.replay_ended()
    for seq in range(3):
        assert sequencer.live(message(seq)) == delivered(seq)
    yield sequencer
    sequencer.check_invariants()


def test_a_copy_is_dropped(sequencer):
    assert sequencer.live(message(1)) == []
    assert sequencer.counts.duplicates == 1


def test_a_gap_asks_from_the_last_message_on(sequencer):
    assert sequencer.live(message(5)) == [RequestReplay(2, ReplayCause.GAP)]
    assert sequencer.live(message(6)) == []  # held
    assert sequencer.replayed(message(2)) == []  # the proof
    assert sequencer.replayed(message(3)) == delivered(3)
    assert sequencer.replayed(message(4)) == delivered(4)
    assert sequencer.replayed(message(5)) == delivered(5)
    assert sequencer.replay_ended() == delivered(6)
    assert not sequencer.is_replaying
    assert (sequencer.counts.gaps, sequencer.counts.replays) == (1, 2)


def test_held_messages_are_bounded_and_asked_for_again(sequencer):
    sequencer.live(message(4))
    for seq in range(5, 12):
        assert sequencer.live(message(seq)) == []
    for seq in (2, 3):
        sequencer.replayed(message(seq))
    assert sequencer.replay_ended() == [*delivered(4, 5, 6, 7), RequestReplay(7, ReplayCause.GAP)]


def test_an_answer_given_before_the_gap_was_published_loses_nothing(sequencer):
    sequencer.audit()
    sequencer.live(message(4))
    sequencer.replayed(message(2))
    assert sequencer.replay_ended() == [RequestReplay(2, ReplayCause.GAP)]


def test_an_answer_that_starts_too_late_is_a_loss(sequencer):
    sequencer.live(message(9))
    assert sequencer.replayed(message(7)) == [Lost(3), *delivered(7)]
    assert sequencer.replayed(message(8)) == delivered(8)
    assert sequencer.replay_ended() == delivered(9)
    assert sequencer.counts.lost == 1


def test_a_hole_in_an_answer_is_asked_for_once_more_then_lost(sequencer):
    sequencer.live(message(6))
    for seq in (2, 3, 5):  # 4 is missing
        sequencer.replayed(message(seq))
    assert sequencer.replay_ended() == [RequestReplay(3, ReplayCause.GAP)]
    for seq in (3, 5):
        assert sequencer.replayed(message(seq)) == []
    assert sequencer.replay_ended() == [Lost(4), *delivered(5, 6)]


def test_a_number_that_goes_back_is_another_life(sequencer):
    assert sequencer.live(message(0, life=1)) == [
        Restarted(),
        RequestReplay(0, ReplayCause.RESTART),
    ]
    assert sequencer.replayed(message(0, life=1)) == delivered(0, life=1)
    assert sequencer.replay_ended() == []
    assert sequencer.last_seq == 0


def test_another_digest_at_the_start_of_an_answer_is_another_life(sequencer):
    assert sequencer.connected() == [RequestReplay(2, ReplayCause.CONNECTED)]
    steps = sequencer.replayed(message(2, life=1))
    assert steps == [Restarted(), RequestReplay(0, ReplayCause.RESTART)]


def test_messages_held_for_one_life_are_not_given_out_in_another(sequencer):
    sequencer.live(message(5))
    assert sequencer.replayed(message(2, life=1)) == [
        Restarted(),
        RequestReplay(0, ReplayCause.RESTART),
    ]
    for seq in range(5):
        assert sequencer.replayed(message(seq, life=1)) == delivered(seq, life=1)
    assert sequencer.replay_ended() == []
    assert sequencer.live(message(5, life=1)) == delivered(5, life=1)


def test_a_held_message_may_tell_of_another_life(sequencer):
    sequencer.live(message(5))
    sequencer.live(message(0, life=1))
    sequencer.replayed(message(2))
    assert sequencer.replay_ended() == [Restarted(), RequestReplay(0, ReplayCause.RESTART)]


def test_messages_held_from_before_a_loss_are_dropped(sequencer):
    sequencer.live(message(9))
    sequencer.live(message(4))
    assert sequencer.replayed(message(8)) == [Lost(3), *delivered(8)]
    assert sequencer.replay_ended() == delivered(9)


def test_a_publisher_that_has_not_come_as_far_is_another_life(sequencer):
    sequencer.connected()
    assert sequencer.replay_ended() == [Restarted(), RequestReplay(0, ReplayCause.RESTART)]


def test_the_expected_number_after_a_new_connection_proves_nothing(sequencer):
    sequencer.connected()
    assert sequencer.live(message(3, life=1)) == []


def test_the_same_life_after_a_new_connection_goes_on(sequencer):
    sequencer.connected()
    assert sequencer.replayed(message(2)) == []
    assert sequencer.replay_ended() == []
    assert sequencer.live(message(3)) == delivered(3)


def test_nobody_to_ask_is_a_loss_where_something_is_missing(sequencer):
    sequencer.live(message(5))
    assert sequencer.replay_impossible() == [Lost(3), *delivered(5)]


def test_nobody_to_ask_is_a_loss_after_a_new_connection(sequencer):
    sequencer.connected()
    assert sequencer.replay_impossible() == [Lost(3)]
    assert sequencer.live(message(70)) == delivered(70)


def test_nobody_to_ask_is_no_loss_at_the_beginning():
    sequencer = Sequencer()
    sequencer.connected()
    assert sequencer.replay_impossible() == []
    assert sequencer.live(message(0)) == delivered(0)


def test_a_question_without_an_answer_is_asked_again_and_given_up(sequencer):
    sequencer.live(message(5))
    for _ in range(MAX_ATTEMPTS - 1):
        assert sequencer.replay_timed_out() == [RequestReplay(2, ReplayCause.GAP)]
    assert sequencer.replay_timed_out() == [Lost(3), *delivered(5)]


def test_an_audit_without_an_answer_loses_nothing(sequencer):
    assert sequencer.audit() == [RequestReplay(2, ReplayCause.AUDIT)]
    assert sequencer.audit() == []
    for _ in range(MAX_ATTEMPTS - 1):
        sequencer.replay_timed_out()
    assert sequencer.replay_timed_out() == []
    assert sequencer.live(message(3)) == delivered(3)


def test_an_audit_finds_the_last_message(sequencer):
    sequencer.audit()
    sequencer.replayed(message(2))
    assert sequencer.replayed(message(3)) == delivered(3)
    assert sequencer.replay_ended() == []


def test_answers_that_nobody_awaits_are_ignored(sequencer):
    assert sequencer.replayed(message(0, life=1)) == []
    assert sequencer.replay_ended() == sequencer.replay_timed_out() == []
