"""Figures from records, by hand; the definitions are those of `vllm bench serve`."""

import pytest

from baton.bench.load.records import Slo, compute_figures, parse_slo, spread
from baton.errors import ConfigError
from tests.unit.bench.load.records import cut, failed, whole


def test_one_request():
    figures = compute_figures([whole(token_s=(1.0, 1.5, 3.0))], 4.0, Slo())
    assert figures.ttft_s.mean == 1.0
    assert figures.tpot_s.mean == pytest.approx(1.0)  # (3 - 1) / (3 - 1)
    assert (figures.itl_s.min, figures.itl_s.max, figures.itl_s.num) == (0.5, 1.5, 2)
    assert figures.e2e_s.mean == 3.0
    assert figures.requests_per_s == 0.25
    assert figures.output_tokens_per_s == 0.75
    assert figures.prompt_tokens_per_s == 2.5
    assert figures.total_tokens_per_s == 3.25
    assert figures.mean_in_flight == 0.75
    assert figures.goodput is None


def test_a_chunk_of_several_tokens_is_one_gap_and_tpot_knows():
    figures = compute_figures([whole(token_s=(1.0, 2.0), num_output=5)], 2.0, Slo())
    assert figures.itl_s.num == 1
    assert figures.tpot_s.mean == 0.25
    assert figures.tokens_per_chunk == 2.5


def test_a_server_that_does_not_count_is_counted_by_chunks():
    record = whole(num_output=None)
    assert record.num_output_tokens == 3


def test_failed_and_cut_requests_are_counted_and_have_no_latency():
    figures = compute_figures([whole(), failed(), failed("lost"), failed(), cut()], 4.0, Slo())
    assert (figures.num_complete, figures.num_failed, figures.num_cut) == (1, 3, 1)
    assert [(each.kind, each.num) for each in figures.failures] == [("refused", 2), ("lost", 1)]
    assert figures.ttft_s.num == 1
    assert figures.output_tokens_per_s == (3 + 1) / 4  # a cut one's tokens came


def test_what_comes_after_the_window_is_not_in_its_rates():
    figures = compute_figures([whole(token_s=(1.0, 2.0, 3.0, 4.0), num_output=8)], 2.0, Slo())
    assert figures.output_tokens_per_s == 2.0  # half of 8 in 2 s
    assert figures.requests_per_s == 0.0
    assert figures.mean_in_flight == 1.0
    assert figures.e2e_s.mean == 4.0  # but its latency counts


def test_warm_up_does_not_count():
    figures = compute_figures([whole(phase="warm-up"), whole()], 2.0, Slo())
    assert figures.num_complete == 1


def test_of_nothing():
    figures = compute_figures([], 0.0, Slo(ttft_s=1.0))
    assert figures.ttft_s is None
    assert figures.goodput.share == 0.0


def test_goodput_counts_failures_as_bad():
    slow, quick = whole(token_s=(3.0, 3.5, 4.0)), whole(token_s=(0.5, 0.75, 1.0))
    slo = Slo(ttft_s=1.0, tpot_s=0.3)
    figures = compute_figures([slow, quick, failed(), cut()], 4.0, slo)
    assert figures.goodput.share == pytest.approx(1 / 3)
    assert figures.goodput.requests_per_s == 0.25


def test_a_cut_request_that_had_missed_the_slo_is_not_good():
    """A server that hangs has no failures where the drain is shorter than the timeout."""
    silent, talking = cut(token_s=(), ended_s=5.0), cut(token_s=(0.5,), ended_s=5.0)
    records = [whole(token_s=(0.5, 0.6, 0.7)), silent, talking]
    for slo, share in (
        (Slo(ttft_s=1.0), 1 / 2),
        (Slo(ttft_s=6.0), 1.0),
        (Slo(e2e_s=4.0), 1 / 3),
        (Slo(tpot_s=0.1), 1.0),
    ):
        goodput = compute_figures(records, 4.0, slo).goodput
        assert goodput.share == pytest.approx(share)
        assert goodput.requests_per_s == 0.25


def test_a_bound_is_met_at_its_value_and_by_a_tpot_that_does_not_exist():
    one = whole(token_s=(1.0,), num_output=1)
    assert one.tpot_s is None
    assert Slo(ttft_s=1.0, tpot_s=0.001, e2e_s=1.0).is_met(one)
    assert not Slo(e2e_s=0.999).is_met(one)


def test_percentiles_are_numpys():
    found = spread([1.0, 2.0, 3.0, 4.0])
    assert (found.p50, found.mean, found.num) == (2.5, 2.5, 4)
    assert found.p99 == pytest.approx(3.97)


def test_bounds_as_vllm_writes_them():
    assert parse_slo(["ttft:500", "tpot:50.5ms", "e2el:10000"]) == Slo(0.5, 0.0505, 10.0)
    with pytest.raises(ConfigError):
        parse_slo(["ttft=500"])
    with pytest.raises(ConfigError):
        parse_slo(["itl:500"])


def test_lateness_is_without_what_was_held_back():
    record = whole(sent_s=5.0, scheduled_s=3.0, held_s=1.5)
    assert record.late_s == pytest.approx(0.5)
