import pytest

from baton.bench.architectures.analysis import analyse, compute_cost, contrast
from baton.bench.architectures.plan import Configuration, choose_configurations
from baton.bench.architectures.results import Trouble, metric_of
from baton.bench.load.plan import Closed
from baton.bench.load.records import Slo
from tests.unit.bench.architectures.cells import make_plan, make_proof, make_samples, measure

SINGLE = {"c1": 20, "c2": 30, "c4": 40, "c8": 40}
REPLICATED = {"c1": 40, "c2": 60, "c4": 80, "c8": 80}
BETTER = {"c1": 80, "c2": 120, "c4": 160, "c8": 160}
WORSE = {"c1": 20, "c2": 30, "c4": 40, "c8": 40}
CROSSING = {"c1": 20, "c2": 30, "c4": 160, "c8": 160}


def say(disaggregated, plan=None, troubles=()):
    plan = plan or make_plan()
    rates = {"single": SINGLE, "replicated": REPLICATED, "1P1D": disaggregated}
    return analyse(plan, measure(plan, rates), troubles)


def judgements(analysis, metric):
    return [c.judgement for c in analysis.contrasts if c.metric == metric]


def crossover(analysis, metric):
    return next(each for each in analysis.crossovers if each.metric == metric)


def test_a_split_that_is_ahead_everywhere():
    analysis = say(BETTER)
    assert judgements(analysis, "throughput") == ["wins"] * 4
    assert crossover(analysis, "throughput").kind == "ahead"
    assert analysis.headline.startswith("Disaggregate (1P1D), with 2 workers")


def test_a_split_that_is_behind_everywhere():
    analysis = say(WORSE)
    assert judgements(analysis, "throughput") == ["loses"] * 4
    assert crossover(analysis, "throughput").kind == "behind"
    assert analysis.headline.startswith("Replicate, with 2 workers")
    line = next(line for line in analysis.verdict if "Throughput" in line)
    assert "loses against replication with 1, 2, 4, 8 at once" in line
    assert "-48 % [" in line  # 21 of 41, …: a little less than half


def test_peers_are_held_against_replication_and_do_not_decide():
    """A peer's split that wins is no reason to disaggregate with Baton, whose own loses."""
    plan = make_plan(configurations=choose_configurations(2, peers=("nixl", "vllm-router")))
    rates = {
        "single": SINGLE, "replicated": REPLICATED, "1P1D": WORSE, "peer:nixl-1P1D": BETTER,
        "peer:vllm-router": BETTER,
    }  # fmt: skip
    analysis = analyse(plan, measure(plan, rates), ())
    assert analysis.headline.startswith("Replicate, with 2 workers")
    assert "peer" not in analysis.headline
    for name in ("peer:nixl-1P1D", "peer:vllm-router"):
        some = [
            c for c in analysis.contrasts if (c.metric, c.configuration) == ("throughput", name)
        ]
        assert [c.judgement for c in some] == ["wins"] * 4
        assert any(line.startswith(f"{name}, Throughput: wins") for line in analysis.verdict)


def test_a_split_that_gets_ahead():
    analysis = say(CROSSING)
    found = crossover(analysis, "throughput")
    assert found.kind == "ahead_from"
    assert 2 < found.at < 4
    assert found.low <= found.at <= found.high
    assert found.share == 1.0
    assert analysis.headline.startswith("It depends on the load, with 2 workers, for balanced")
    assert (
        "1P1D against replication, throughput: wins with 4, 8 at once (most +" in analysis.headline
    )
    assert f"ahead from about {found.at:.1f} at once on" in analysis.headline
    line = next(line for line in analysis.verdict if "Throughput" in line)
    assert f"Crossover: ahead from about {found.at:.1f} at once (95 % [" in line


def test_two_arms_that_are_the_same_are_not_told_apart():
    plan = make_plan()
    samples = measure(plan, {"replicated": REPLICATED})
    # One request more in one repetition, one less in the next.
    samples += [
        make_samples("1P1D", level, r, num + r + (-1) ** r)
        for level, num in REPLICATED.items()
        for r in range(1, 6)
    ]
    analysis = analyse(plan, samples, ())
    assert set(judgements(analysis, "throughput")) == {"undecided"}
    assert analysis.headline.startswith("Not decided")


def test_less_is_better_for_latency():
    pairs = [(100.0, 50.0 + i) for i in range(5)]
    assert contrast(metric_of("ttft_p99"), "1P1D", "c1", pairs).judgement == "wins"
    assert contrast(metric_of("throughput"), "1P1D", "c1", pairs).judgement == "loses"


def test_one_repetition_decides_nothing():
    analysis = say(BETTER, make_plan(repetitions=1))
    assert set(judgements(analysis, "throughput")) == {"undecided"}
    assert any("1 repetitions" in line for line in analysis.cautions)


def test_where_nothing_kept_the_slo_signs_are_counted():
    goodput = metric_of("goodput")
    none = contrast(goodput, "1P1D", "c1", [(0.0, 1.0)] * 5)
    assert (none.ratio, none.judgement) == (None, "wins")
    assert contrast(goodput, "1P1D", "c1", [(1.0, 0.0)] * 5).judgement == "loses"
    assert contrast(goodput, "1P1D", "c1", [(1.0, 0.0)] * 4).judgement == "undecided"
    assert contrast(goodput, "1P1D", "c1", [(1.0, 0.0)] * 4 + [(0.0, 1.0)]).judgement == "undecided"


def test_an_slo_is_derived_from_one_request_alone_on_one_worker():
    analysis = say(BETTER, make_plan(slo=None))
    assert analysis.slo == Slo(pytest.approx(0.5), pytest.approx(0.02))
    assert "5 times TTFT and 2 times TPOT of single with 1 at once" in analysis.slo_words


def test_an_slo_is_not_derived_from_cells_that_are_left_out():
    plan = make_plan(slo=None)
    died = {"ttft_s": 9.0, "ended_early": "a server died"}
    cells = [make_samples("single", "c1", n, 9, **died) for n in (1, 2, 3)]
    cells += [make_samples("single", "c1", n, 9) for n in (4, 5)]
    assert analyse(plan, cells, ()).slo.ttft_s == pytest.approx(0.5)


def test_goodput_is_counted_for_each_worker():
    plan = make_plan()
    analysis = analyse(plan, measure(plan, {"single": SINGLE, "replicated": SINGLE}), ())
    points = {(p.configuration, p.level): p for p in analysis.points if p.metric == "goodput"}
    ratio = points["single", "c8"].estimate.mean / points["replicated", "c8"].estimate.mean
    assert ratio == pytest.approx(2.0)


def test_cells_that_ended_early_are_left_out_and_said():
    plan = make_plan()
    samples = measure(plan, {"replicated": REPLICATED, "1P1D": BETTER})
    died = make_samples("1P1D", "c1", 1, 1, ended_early="a server died")
    samples = [died if s.cell.run == "x" else s for s in samples]
    samples[[(s.cell.configuration, s.cell.level) for s in samples].index(("1P1D", "c1"))] = died
    analysis = analyse(plan, samples, (Trouble("1P1D", 1, "prefill-0 ended"),))
    point = next(
        p
        for p in analysis.points
        if (p.metric, p.configuration, p.level) == ("throughput", "1P1D", "c1")
    )
    assert len(point.estimate.values) == 4
    assert analysis.cautions[0] == "1P1D FAILED in repetition 1: prefill-0 ended"
    assert any("left out, it ended early (a server died)" in line for line in analysis.cautions)


def test_an_arm_without_proof_is_called_so():
    plan = make_plan()
    samples = measure(plan, {"replicated": REPLICATED, "1P1D": BETTER})
    bad = make_proof(num_not_handed_over=3, fallbacks={"timeout": 3})
    samples.append(make_samples("1P1D", "c1", 1, 81, proof=bad))
    analysis = analyse(plan, samples, ())
    assert "WITHOUT PROOF that KV moved in 1P1D" in analysis.headline
    reported = [line for line in analysis.cautions if "NO PROOF" in line]
    (line,) = reported
    assert line.startswith("1P1D: NO PROOF that KV moved in 1 cells, such as c1, repetition 1: ")
    assert line.endswith("3 of 10 requests were not handed over (3 x timeout)")


def test_what_was_cut_short_needs_no_proof():
    plan = make_plan()
    samples = measure(plan, {"replicated": REPLICATED, "1P1D": BETTER})
    bad = make_proof(num_not_handed_over=3, fallbacks={"timeout": 3})
    samples.append(make_samples("1P1D", "c1", 6, 81, proof=bad, ended_early="interrupted"))
    analysis = analyse(plan, samples, ())
    assert "PROOF" not in analysis.headline
    assert not any("PROOF" in line for line in analysis.cautions)
    assert "1P1D, c1, repetition 6: left out, it ended early (interrupted)" in analysis.cautions


def test_noise_is_reported():
    plan = make_plan()
    samples = [make_samples("single", "c1", r, 20 * r) for r in range(1, 6)]
    cautions = analyse(plan, samples, ()).cautions
    assert any(line.startswith("single: noisy with 1 at once: ") for line in cautions)


def test_cost_is_kept_apart_for_input_and_output():
    samples = make_samples("1P1D", "c1", 1, 100)
    figures = samples.cell.figures
    cost = compute_cost(Configuration("1P1D", 0, 1, 1), "c1", [samples.cell], 0.001)
    assert cost.per_1000_input == pytest.approx(2 / figures.prompt_tokens_per_s)
    assert cost.per_1000_output == pytest.approx(2 / figures.output_tokens_per_s)
    assert cost.per_1000_input_own == pytest.approx(1 / figures.prompt_tokens_per_s)
    own = cost.per_1000_input_own * figures.prompt_tokens_per_s
    own += cost.per_1000_output_own * figures.output_tokens_per_s
    assert own == pytest.approx(2.0)  # shares add up to what two workers cost
    both = compute_cost(Configuration("replicated", 2), "c1", [samples.cell], 0.001)
    assert both.per_1000_input_own is None


def test_a_benchmark_without_replication_has_no_verdict():
    plan = make_plan()
    analysis = analyse(plan, measure(plan, {"single": SINGLE}), ())
    assert analysis.headline.startswith("No verdict")
    assert isinstance(plan.levels[0].load, Closed)
