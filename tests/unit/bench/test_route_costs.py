"""`baton route costs`: from results of benchmarks to what a gateway begins with."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton.bench.route_costs import fit_costs, read_measured_links
from baton.cli.main import run
from baton.errors import ConfigError
from baton.gateway.learned_costs import KeptFile, keep_costs
from baton.router.handoff_costs import LinkCost, guess_exposed
from baton.router.load import FleetLoad
from baton.router.topology import Distance
from tests.unit.bench.compare.test_compare import report_of
from tests.unit.bench.load.records import failed, whole

LINK = Path(__file__).parents[3] / "benchmarks/results/link.json"
PREFILL, STEP = (0.02, 1e-4), (0.005, 1e-3)
NUM_OUTPUT = 33


def serve(num_tokens, num_at_once=1, num=10, num_workers=1):
    """Waves of requests at workers with these costs; the prompts of a wave come one by one."""
    records, began = [], 0.0
    takes_s = PREFILL[0] + PREFILL[1] * num_tokens
    step_s = STEP[0] + STEP[1] * num_at_once / num_workers
    for _ in range(num):
        for at in range(num_at_once):
            first = (at // num_workers + 1) * takes_s
            rest = max(1, num_at_once // num_workers) * takes_s  # steps come after all prompts
            token_s = [first, *(rest + step_s * (1 + i) for i in range(NUM_OUTPUT - 1))]
            fields = {"num_output": NUM_OUTPUT, "num_prompt": num_tokens}
            records.append(whole(sent_s=began, token_s=tuple(token_s), **fields))
        began += num_at_once * takes_s + 2 * NUM_OUTPUT * step_s
    return report_of([*records, failed(sent_s=began, ended_s=began + 0.1)])


def write(folder, *reports):
    paths = [folder / f"{at}.json" for at in range(len(reports))]
    for path, report in zip(paths, reports, strict=True):
        path.write_bytes(msgspec.json.encode(report))
    return list(map(str, paths))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_lines_of_the_runs_are_found(num_workers):
    reports = [serve(100), serve(2000), serve(10, 8, num_workers=num_workers)]
    found = fit_costs(reports, num_workers, None)
    assert found.prefill.num_seen == 20, "of the wave no prompt was computed alone"
    assert (found.prefill.line.fixed_s, found.prefill.line.each_s) == pytest.approx(PREFILL)
    assert found.prefill.error < 1e-6
    for size in (1, 8 / num_workers):
        line = found.step.line
        assert line.fixed_s + line.each_s * size == pytest.approx(STEP[0] + STEP[1] * size, rel=0.1)


def test_a_warm_up_is_no_part_of_the_load():
    """Its times begin at 0, too: it would seem to be under way beside what is measured."""
    reports = []
    for report in (serve(100), serve(2000), serve(10, 8)):
        warm_up = tuple(
            msgspec.structs.replace(each, phase="warm-up") for each in report.records[:8]
        )
        reports.append(msgspec.structs.replace(report, records=(*warm_up, *report.records)))
    assert fit_costs(reports, 1, None) == fit_costs(
        [serve(100), serve(2000), serve(10, 8)], 1, None
    )


def test_a_gateway_predicts_by_the_file(tmp_path, capsys):
    out, reports = tmp_path / "costs.json", [serve(100), serve(2000), serve(10, 8)]
    links = ["--link", f"same_rack={LINK}", "--kv-of", "demo"]
    results = write(tmp_path, *reports)
    assert run(["route", "costs", *results, "--out", str(out), *links]) == 0
    assert "prefill, by tokens" in capsys.readouterr().out
    kept = msgspec.json.decode(out.read_bytes(), type=KeptFile).models["m"]

    async def begin():
        load = FleetLoad()
        async with keep_costs(out, load):
            costs = load.costs("m")
            assert costs.prefill.predict(500) == pytest.approx(PREFILL[0] + 500 * PREFILL[1])
            assert costs.step.predict(1) == pytest.approx(STEP[0] + STEP[1], rel=0.1)
            line = costs.handoffs.lines[Distance.SAME_RACK]
            handoff = kept.handoff["same_rack"]
            assert (line.fixed, line.each) == (handoff.fixed_s, handoff.each_s)
            assert costs.handoffs.source(Distance.SAME_RACK) == "kept"

    asyncio.run(begin())


def test_a_handoff_is_what_a_gateway_would_guess_of_that_link():
    """`benchmarks/results/link.json`: of its transports the fastest by push."""
    measured = read_measured_links([f"cross_zone={LINK}"], "demo")
    link = measured.by_distance["cross_zone"]
    assert 1e-7 < link.latency_s < 1e-3
    assert 1e9 < 1 / link.byte_s < 1e11
    prefill = fit_costs([serve(100), serve(2000), serve(10, 8)], 1, measured)
    expected = guess_exposed(link, measured.shape, prefill.prefill.line.each_s)
    found = prefill.handoff["cross_zone"]
    assert (found.fixed_s, found.each_s) == expected
    slow = LinkCost(link.latency_s, 100 * link.byte_s)
    assert guess_exposed(slow, measured.shape, 1e-4)[1] > found.each_s


@pytest.mark.parametrize(
    ("reports", "missing"),
    [
        ([serve(100, num=3), serve(2000, num=3)], r"computed alone: run .*--concurrency 1.*are 6"),
        ([serve(10, 8)], "computed alone: run `baton bench serve --concurrency 1`"),
        ([serve(100)], "about as long: add a run with another --input-len .*100 to 100"),
        ([serve(100), serve(2000)], "at once: add a run with another --concurrency"),
    ],
)
def test_what_is_missing_is_named(reports, missing, tmp_path):
    with pytest.raises(ConfigError, match=missing):
        fit_costs(reports, 1, None)


@pytest.mark.parametrize(
    ("links", "kv_of", "missing"),
    [
        ([f"same_rack={LINK}"], None, "add --kv-of"),
        ([f"near={LINK}"], "demo", "distances are same_device"),
        ([str(LINK)], "demo", "write DISTANCE=FILE"),
        (["same_rack=/none.json"], "demo", "cannot read /none.json"),
        ([f"same_rack={LINK}"], "no-such-model", "no file or folder"),
    ],
)
def test_a_link_needs_a_distance_a_result_and_a_model(links, kv_of, missing):
    with pytest.raises(ConfigError, match=missing):
        read_measured_links(links, kv_of)


def test_nothing_is_written_where_something_is_missing(tmp_path, capsys):
    out = tmp_path / "costs.json"
    assert run(["route", "costs", *write(tmp_path, serve(100)), "--out", str(out)]) != 0
    assert "another --input-len" in capsys.readouterr().err
    assert run(["route", "costs", "--out", str(out)]) != 0
    assert run(["route", "costs", str(LINK), "--out", str(out)]) != 0
    assert "not baton-bench-serve" in capsys.readouterr().err
    assert not out.exists()
