import re
from io import StringIO
from xml.etree import ElementTree as ET

import msgspec
import pytest

from baton.bench.architectures.page import write_page
from baton.bench.architectures.results import Findings, Trouble, measured_metrics
from baton.bench.charts import Chart, Mark, Series, draw_chart, draw_findings
from baton.bench.printing import format_number, print_findings
from tests.unit.bench.architectures import cells
from tests.unit.bench.architectures.cells import make_plan, make_samples, measure

SVG = "{http://www.w3.org/2000/svg}"


def make_findings(concurrency="1,2,4", troubles=()):
    plan = make_plan(concurrency, cost_per_worker_hour=1.0)
    rates = {arm.name: {level.key: 50 for level in plan.levels} for arm in plan.configurations}
    return cells.make_findings(plan, measure(plan, rates), troubles)


@pytest.fixture(scope="module")
def charts():
    return draw_findings(make_findings())


def test_the_page_needs_nothing_from_outside(charts):
    findings = make_findings()
    page = write_page(findings, charts)
    # `href="#…"` and `url(#…)` are places of the same page.
    assert re.search(r"src=|href=\"(?!#)|url\((?!#)|@import|<script|<link", page) is None
    assert page.count("<svg") == len(measured_metrics(findings.cells))
    assert "Did KV really move?" in page
    assert "Cost of 1,000 tokens" in page


def test_what_servers_say_is_text_and_no_markup(charts):
    evil = "<img src=x onerror=alert(1)>"
    findings = make_findings(troubles=[Trouble("1P1D", 1, evil)])
    page = write_page(findings, charts)
    assert evil not in page
    assert "&lt;img" in page
    assert "&lt;demo&gt;" in page


def test_a_partial_result_says_so():
    findings = msgspec.structs.replace(make_findings(), is_partial=True, ended="interrupted")
    assert "PARTIAL: interrupted" in write_page(findings, {})


def test_cells_without_an_answer_are_shown_as_failed_and_counted():
    plan = make_plan("1,2", repetitions=3)
    rates = {arm.name: {level.key: 50 for level in plan.levels} for arm in plan.configurations}
    measured = [
        make_samples("1P1D", "c2", each.cell.repetition, 0)
        if (each.cell.configuration, each.cell.level) == ("1P1D", "c2") and each.cell.repetition > 1
        else each
        for each in measure(plan, rates)
    ]
    findings = cells.make_findings(plan, measured)
    printed = StringIO()
    print_findings(findings, printed)
    for shown in (write_page(findings, {}), printed.getvalue()):
        assert shown.count("2 of 3 failed") == shown.count(" failed") == 1


def test_findings_survive_their_file():
    findings = make_findings()
    assert msgspec.json.decode(msgspec.json.encode(findings), type=Findings) == findings


def spots(chart):
    """Places of all means: the marks with a title."""
    root = ET.fromstring(draw_chart(chart).svg)
    marks = [each for each in root.iter(f"{SVG}g") if each.find(f"{SVG}title") is not None]
    places = [next(mark.iter(f"{SVG}use")) for mark in marks]
    return [(float(each.get("x")), float(each.get("y"))) for each in places]


def make_chart(*values, xs=(1.0, 2.0, 8.0)):
    marks = tuple(Mark(x, y, y * 0.9, y * 1.1, (y,)) for x, y in zip(xs, values, strict=True))
    return Chart("t <&>", "s", "x", (Series("arm", 0, marks),))


def test_larger_is_higher_and_loads_are_spread_by_their_logarithm():
    (x1, y1), (x2, y2), (x3, y3) = spots(make_chart(1.0, 2.0, 4.0))
    assert y1 > y2 > y3
    assert (x3 - x2) / (x2 - x1) == pytest.approx(2.0, rel=0.01)
    assert (y1 - y2) / (y2 - y3) == pytest.approx(0.5, rel=0.01)  # linear


def test_values_far_apart_are_shown_by_their_logarithm():
    places = spots(make_chart(1.0, 10.0, 100.0))
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)


@pytest.mark.parametrize("values", [(0.0, 0.0, 0.0), (0.0, 5.0, 1e6), (1e-9, 1.0, 1e9)])
def test_any_values_are_drawn_within_the_chart(values):
    for x, y in spots(make_chart(*values)):
        assert 0 < x < 446.4  # points
        assert 60 < y < 228


def test_one_load_and_none():
    assert len(spots(make_chart(3.0, xs=(4.0,)))) == 1
    assert "nothing was measured" in draw_chart(Chart("t", "s", "x", (Series("arm", 0, ()),))).svg


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.012345, "0.0123"), (1.5, "1.5"), (12345.6, "12,346"), (100, "100"), (-2, "-2")],
)
def test_numbers_have_three_digits_that_matter(value, text):
    assert format_number(value) == text
