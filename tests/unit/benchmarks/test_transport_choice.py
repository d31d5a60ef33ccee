"""What would be chosen, and what that costs."""

import io

import pytest

from baton.bench.files import open_manifest
from baton.bench.link.report import Skipped
from baton.bench.printing import MAX_COLUMNS
from baton.clock import MachineClock
from baton.rig.pages import Workload
from baton.transfer.links.cost_model import LinkModel
from benchmarks.transport_choice_model import (
    PAGE_SIZES,
    THOROUGH,
    ChoicePlan,
    ChoiceReport,
    Decision,
    MeasuredLink,
    SurveyedLink,
    Timed,
    judge,
    print_choices,
    shape_of,
    sum_up,
)

QUICK_START, QUICK_RUN = LinkModel(10e-6, 1e-6, 1e-9), LinkModel(500e-6, 1e-6, 1e-10)
TRUTH = {"start": QUICK_START, "run": QUICK_RUN}
SMALL, LARGE = Workload("message", 4096), Workload("message", 1 << 26)


def timed(workload, direction="push"):
    """Three samples each; the middle one is what the true link takes."""
    took = {kind: model.predict(shape_of(workload)) for kind, model in TRUTH.items()}
    samples = {kind: (0.9 * each, each, 1.1 * each) for kind, each in took.items()}
    return Timed(workload, direction, samples)


def test_a_true_survey_regrets_nothing():
    cells = judge([timed(SMALL), timed(LARGE)], [{"push": TRUTH, "pull": {}}])
    assert [cell.best for cell in cells] == ["start", "run"]
    for cell in cells:
        (decision,) = cell.surveyed
        assert decision.chosen == cell.best
        assert (decision.regret, decision.error) == pytest.approx((0.0, 0.0))


def test_a_wrong_survey_regrets_by_what_was_measured_and_each_survey_counts():
    wrong = {"start": QUICK_RUN, "run": QUICK_START}
    (cell,) = judge([timed(LARGE)], [{"push": wrong, "pull": {}}, {"push": TRUTH, "pull": {}}])
    first, second = cell.surveyed
    shape = shape_of(LARGE)
    slow_s, quick_s = (TRUTH[kind].predict(shape) for kind in ("start", "run"))
    assert (first.chosen, second.chosen) == ("start", "run")
    assert first.regret == pytest.approx(slow_s / quick_s - 1)
    assert first.error == pytest.approx(quick_s / slow_s - 1)


def test_a_link_that_was_not_measured_in_time_is_no_choice():
    cells = judge([timed(SMALL), timed(SMALL, "pull")], [{"push": {"run": QUICK_RUN}, "pull": {}}])
    assert cells[0].surveyed[0].chosen == "run"
    assert cells[0].surveyed[0].regret > 1
    assert cells[1].surveyed == ()


def test_the_verdict_counts_what_is_within_the_allowed_regret():
    regrets = (0.0, 0.05, 0.051, 1.0)
    verdict = sum_up([Decision("a", 1.0, regret, -regret) for regret in regrets])
    assert (verdict.num_decisions, verdict.num_within, verdict.worst_regret) == (4, 2, 1.0)
    assert verdict.median_error == pytest.approx(0.0505)
    assert sum_up([]) is None


def test_every_size_and_shape_fits_into_its_pool():
    plan = ChoicePlan((), THOROUGH)
    for page_bytes in PAGE_SIZES:
        for workload in plan.workloads_of(page_bytes):
            assert workload.num_pages <= plan.num_pages_of(page_bytes)
            assert workload.shape == "message" or workload.num_pages >= 2
    shapes = {(each.shape, each.page_bytes, each.num_bytes) for each in plan.workloads}
    assert len(shapes) == len(plan.workloads)
    assert {size for shape, _, size in shapes if shape == "message"} == set(THOROUGH.sizes)


def test_the_table_fits_and_says_who_is_chosen():
    check_server = {"push": TRUTH, "pull": {}}
    wrong = {"push": {"run": QUICK_RUN}, "pull": {}}
    cells = judge([timed(SMALL), timed(LARGE)], [check_server, check_server, wrong])
    manifest = open_manifest((), MachineClock())
    report = ChoiceReport(
        manifest=manifest,
        links=(SurveyedLink(0, "push", MeasuredLink("start", 1e-5, 1e-6, 1e-9, 15)),),
        cells=cells,
        surveyed=sum_up([each for cell in cells for each in cell.surveyed]),
        skipped=(Skipped("transport", "file", "no directory"),),
    )
    out = io.StringIO()
    print_choices(report, out)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS + 60  # sentences are not wrapped
    assert "start 2/3" in text
    assert "5 of 6 choices within 5 %" in text
    assert "not measured: file: no directory" in text
