"""Which requests are kept: failed ones, and those slower than a share of the latest."""

from __future__ import annotations

import random
from array import array

import pytest

from baton.gateway.request_history import RequestRecord
from baton.gateway.tail_sampling import MIN_SEEN, WINDOW, HeadSampler, KeptKind, TailSampler
from baton.telemetry.trace import RequestSpan, Stamp, pack_token_gaps


def record(
    ttft_s: float | None, *, total_s: float = 1.0, status: int = 200, num_gaps: int = 1
) -> RequestRecord:
    trace = RequestSpan(request_id="r", worker="g", epoch="e", role="gateway")
    trace.stamp(Stamp.RECEIVED, 100.0)
    if ttft_s is not None:
        trace.stamp(Stamp.FIRST_TOKEN, 100.0 + ttft_s)
    trace.stamp(Stamp.FINISHED, 100.0 + total_s)
    trace.token_gaps = pack_token_gaps(array("f", [0.1] * num_gaps))
    return RequestRecord(trace, None, status, num_streamed=num_gaps + 1 if num_gaps else 0)


def test_failed_requests_are_kept() -> None:
    sampler = TailSampler(0.99, None)
    failed = record(0.1, status=502)
    failed.trace.outcome = "error: the worker was lost"
    assert sampler.look(failed) == (KeptKind.FAILED, "error: the worker was lost")
    assert sampler.look(record(None, status=429)) is None
    assert sampler.look(record(None, status=499)) is None


def test_about_the_wanted_share_is_slow_and_the_slowest_are() -> None:
    sampler, rng = TailSampler(0.95, None), random.Random(19)
    kept: list[float] = []
    for _ in range(20 * WINDOW):
        ttft_s = rng.lognormvariate(-2, 1)
        if sampler.look(record(ttft_s)) is not None:
            kept.append(ttft_s)
    assert 0.03 < len(kept) / (20 * WINDOW) < 0.07
    assert min(kept) > 0.3  # the 95th percentile of this distribution is 0.7 s


def test_the_limit_follows_the_traffic() -> None:
    sampler = TailSampler(0.9, None)
    for at in range(2 * WINDOW):
        sampler.look(record(1.0 + at % 10 / 100))
    assert sampler.look(record(1.05)) is None
    assert sampler.look(record(2.0))[0] is KeptKind.SLOW
    for at in range(2 * WINDOW):
        sampler.look(record(0.1 + at % 10 / 1000))
    assert sampler.look(record(1.05))[0] is KeptKind.SLOW


def test_nothing_is_slow_before_enough_is_seen_but_what_the_operator_names() -> None:
    sampler = TailSampler(0.5, 3.0)
    for at in range(MIN_SEEN - 2):
        assert sampler.look(record(1.0 * (at % 3))) is None
    kind, why = sampler.look(record(4.0))
    assert kind is KeptKind.SLOW
    assert why == "its first token took 4.000 s, above 3 s"


def test_slow_tokens_make_a_stream_slow() -> None:
    sampler = TailSampler(0.9, None)
    for _ in range(2 * MIN_SEEN):
        assert sampler.look(record(0.1, total_s=1.1, num_gaps=20)) is None
    found = sampler.look(record(0.1, total_s=30.0, num_gaps=20))
    assert found is not None
    assert found[1].startswith("a token took")


def test_answers_in_one_piece_are_compared_with_their_like() -> None:
    sampler = TailSampler(0.9, None)
    for _ in range(2 * MIN_SEEN):
        sampler.look(record(0.1, total_s=1.0))
        assert sampler.look(record(5.0, total_s=5.0, num_gaps=0)) is None
    assert sampler.look(record(9.0, total_s=9.0, num_gaps=0))[1].startswith("its answer took")
    # Its worker has not reported its first token.
    assert sampler.look(record(None, total_s=9.0, num_gaps=0))[1].startswith("its answer took")
    assert sampler.look(record(None, total_s=9.0, num_gaps=0, status=499)) is None


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_new_traces_is_sampled_evenly(share: float) -> None:
    sampler = HeadSampler(share)
    assert sum(sampler.next() for _ in range(400)) == 400 * share
