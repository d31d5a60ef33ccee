"""Findings → one HTML page that needs nothing else: no network, no script. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from baton.bench.architectures.results import describe_failed, measured_metrics
from baton.bench.architectures.usage import UNMEASURED
from baton.bench.architectures.verdict import format_change
from baton.bench.charts import ChartFiles, colour_of
from baton.bench.printing import describe_slo, format_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from baton.bench.architectures.results import Cell, Contrast, Estimate, Findings, Proof

NUM_NAMES: Final = 2
"""Columns of a table that name what the numbers to the right of them are of."""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """`rows` are HTML already; a new first cell begins a new group."""
    yield "<div class='scroll'><table><tr>"
    for i, word in enumerate(head):
        yield f"<th class='{'name' if i < NUM_NAMES else ''}'>{escape(word)}</th>"
    yield "</tr>"
    before = ""
    for row in rows:
        yield f"<tr class='{'first' if row[0] != before else ''}'>"
        for i, cell in enumerate(row):
            yield f"<td class='{'name' if i < NUM_NAMES else ''}'>{cell}</td>"
        yield "</tr>"
        before = row[0]
    yield "</table></div>"


def show_results(findings: Findings) -> Iterator[str]:
    """Every metric of every configuration and load, against replication."""
    points = {(p.metric, p.configuration, p.level): p.estimate for p in findings.analysis.points}
    against = {(c.metric, c.configuration, c.level): c for c in findings.analysis.contrasts}
    metrics, rows = measured_metrics(findings.cells), []
    for level in findings.levels:
        for place, configuration in enumerate(findings.configurations):
            arm = _arm(place, configuration.name)
            if failed := describe_failed(findings, configuration.name, level.key):
                arm += f"<span class='small loses'>{failed}</span>"
            row = [escape(level.words), arm]
            for metric in metrics:
                key = (metric.key, configuration.name, level.key)
                row.append(_value(points.get(key), against.get(key)))
            rows.append(row)
    yield "<h2>All metrics</h2>"
    yield (
        "<p class='faint'>Mean over repetitions ± half of its 95 % interval; below it a split's "
        "change against replication with its 95 % interval, <span class='wins'>better</span>, "
        "<span class='loses'>worse</span> or <span class='undecided'>not decided</span>.</p>"
    )
    yield from _table(("load", "arm", *(f"{m.short}, {m.unit}" for m in metrics)), rows)


def _value(estimate: Estimate | None, contrast: Contrast | None) -> str:
    text = "-" if estimate is None else format_number(estimate.mean)
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        half = format_number((estimate.high - estimate.low) / 2)
        text += f"<span class='small undecided'>± {half}</span>"
    if contrast is not None and contrast.ratio is not None:
        change = escape(format_change(contrast))
        text += f"<span class='small {contrast.judgement}'>{change}</span>"
    return text


def _arm(place: int, name: str) -> str:
    return f"<span class='dot' style='background:{colour_of(place)}'></span>{escape(name)}"


def show_proofs(findings: Findings) -> Iterator[str]:
    """KV that decode needed and received."""
    rows = []
    for place, configuration in enumerate(findings.configurations):
        for level in findings.levels:
            cells = _cells(findings, configuration.name, level.key)
            proofs = [cell.proof for cell in cells if cell.proof is not None and cell.is_usable]
            if proofs:
                rows.append([
                    _arm(place, configuration.name),
                    escape(level.words),
                    *_proof_words(proofs),
                ])
    if rows:
        yield "<h2>Did KV really move?</h2><p class='faint'>From the traces of every answered "
        yield "request, warm-up included: tokens whose KV decode lacked (prompt less cached), and "
        yield "tokens whose KV it received. (Where less than a block is lacking after cached ones, "
        yield "decode computes it itself, by design.) Of a peer: its own metrics, in "
        yield "sum.</p>"
        head = ("arm", "load", "proved", "requests", "tokens needed", "tokens received", "MB",
                "not handed over", "fallbacks", "mode / transport")  # fmt: skip
        yield from _table(head, rows)


def _proof_words(proofs: Sequence[Proof]) -> Iterator[str]:
    sound = all(proof.is_proved for proof in proofs)
    yield f"<span class='{'wins' if sound else 'loses'}'>{'yes' if sound else 'NO'}</span>"
    yield f"{sum(proof.num_requests for proof in proofs):,}"
    yield f"{sum(proof.num_needed_tokens for proof in proofs):,}"
    yield f"{sum(proof.num_received_tokens for proof in proofs):,}"
    yield f"{sum(proof.num_bytes for proof in proofs) / 1e6:,.1f}"
    yield f"{sum(proof.num_not_handed_over for proof in proofs):,}"
    yield f"{sum(sum(proof.fallbacks.values()) for proof in proofs):,}"
    modes = ", ".join(sorted({mode for proof in proofs for mode in proof.modes}))
    transports = ", ".join(sorted({name for proof in proofs for name in proof.transports}))
    unknown = any(proof.source == "none" for proof in proofs)
    yield "not shown by the peer" if unknown else escape(f"{modes} / {transports}")


def _cells(findings: Findings, configuration: str, level: str) -> list[Cell]:
    return [
        cell
        for cell in findings.cells
        if (cell.configuration, cell.level) == (configuration, level)
    ]


def show_stages(findings: Findings) -> Iterator[str]:
    """Stages of a request, and CPU time by process."""
    rows = []
    for level in findings.levels:
        for place, configuration in enumerate(findings.configurations):
            cells = _cells(findings, configuration.name, level.key)
            if cells:
                rows.append([
                    escape(level.words),
                    _arm(place, configuration.name),
                    *_stage_words(cells),
                ])
    yield "<h2>Where the time goes</h2><p class='faint'>Medians of each run's traces, in ms, "
    yield "averaged over repetitions (below 0: all KV was there before prefill ended). Then CPU "
    yield "seconds in each second of the clock, and the most that others took of the machine.</p>"
    head = ("load", "arm", "queue", "prefill", "visible handoff", "decode queue",
            "workers' CPU", "gateway's", "client's", "others")  # fmt: skip
    yield from _table(head, rows)


def _stage_words(cells: Sequence[Cell]) -> Iterator[str]:
    for values in (
        [c.stages.queue_s for c in cells],
        [c.stages.prefill_s for c in cells],
        [c.stages.exposed_transfer_s for c in cells],
        [c.stages.decode_queue_s for c in cells],
    ):
        known = [value for value in values if value is not None]
        yield format_number(sum(known) / len(known) * 1e3) if known else "-"
    wall_s = sum(cell.cpu.wall_s for cell in cells)
    names = sorted({name for cell in cells for name in cell.cpu.workers_s})
    yield ", ".join(
        f"{escape(name)} {sum(c.cpu.workers_s.get(name, 0.0) for c in cells) / wall_s:.2f}"
        for name in names
    )
    yield f"{sum(cell.cpu.gateway_s for cell in cells) / wall_s:.2f}"
    yield f"{sum(cell.cpu.client_s for cell in cells) / wall_s:.2f}"
    shares = [c.cpu.others_share for c in cells if c.cpu.others_share is not None]
    yield f"{max(shares):.0%}" if shares else "-"


def show_costs(findings: Findings) -> Iterator[str]:
    """Cost of input and output; nothing without a price."""
    if not findings.analysis.costs:
        return
    places = {
        configuration.name: place for place, configuration in enumerate(findings.configurations)
    }
    words = {level.key: level.words for level in findings.levels}
    rows = [
        [
            escape(words[cost.level]),
            _arm(places[cost.configuration], cost.configuration),
            *(
                "-" if price is None else f"{price:.6f}"
                for price in (
                    cost.per_1000_input,
                    cost.per_1000_output,
                    cost.per_1000_input_own,
                    cost.per_1000_output_own,
                )
            ),
        ]
        for cost in findings.analysis.costs
    ]
    yield "<h2>Cost of 1,000 tokens</h2><p class='faint'>The first two are the whole "
    yield "cost: compare them between configurations, do not add them. The last two are shares: "
    yield "prefill workers by input, decode workers by output.</p>"
    head = ("load", "arm", "whole / 1,000 input", "whole / 1,000 output",
            "prefill workers / 1,000 input", "decode workers / 1,000 output")  # fmt: skip
    yield from _table(head, rows)


STYLE: Final = """
:root{--ink:#1d2530;--faint:#667080;--line:#e1e6ed;--card:#fff;--ground:#f4f6f9;--good:#1b7f3b;
--bad:#c0392b}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:25px;line-height:1.3;margin:0 0 6px}
h2{font-size:18px;margin:36px 0 10px}
p{margin:6px 0}
.faint{color:var(--faint)}
.verdict{background:var(--card);border-left:6px solid #1f6fb4;border-radius:8px;padding:18px 22px;
box-shadow:0 1px 3px rgba(20,30,50,.09);margin:18px 0}
.why{font-size:16.5px;font-weight:600}
.verdict ul{margin:10px 0 0;padding-left:20px}
.verdict li{margin:3px 0}
.caution{background:#fff8e6;border-left:6px solid #e0a100;border-radius:8px;padding:12px 22px}
.partial{background:#fdecea;border-left:6px solid var(--bad);border-radius:8px;padding:12px 22px;
font-weight:600}
.caution ul{margin:4px 0;padding-left:20px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(520px,1fr));gap:16px}
.charts figure{margin:0;background:#fff;border-radius:8px;padding:6px;
box-shadow:0 1px 3px rgba(20,30,50,.09)}
.charts svg{width:100%;height:auto;display:block}
.scroll{overflow-x:auto;background:var(--card);border-radius:8px;
box-shadow:0 1px 3px rgba(20,30,50,.09)}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 9px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;
vertical-align:top}
th{color:var(--faint);font-weight:600;background:#fafbfd}
td.name,th.name{text-align:left}
tr.first td{border-top:2px solid #c9d1dc}
.wins{color:var(--good);font-weight:600}
.loses{color:var(--bad);font-weight:600}
.undecided{color:var(--faint)}
.small{font-size:11px;display:block}
.dot{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:7px}
pre{background:#fff;border-radius:8px;padding:12px 16px;overflow-x:auto;font-size:12.5px;
white-space:pre-wrap}
@media(max-width:600px){.charts{grid-template-columns:1fr}}
@media print{body{background:#fff}.charts figure,.scroll{break-inside:avoid}}
"""


def write_page(findings: Findings, charts: Mapping[str, ChartFiles]) -> str:
    """The whole page."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<title>Baton: {escape(findings.workload)}, {findings.num_workers} workers</title>",
        f"<style>{STYLE}</style></head><body><main>",
        *_top(findings),
        *_cautions(findings),
        *_figures(charts),
        *show_results(findings),
        *show_proofs(findings),
        *show_stages(findings),
        *show_costs(findings),
        *_circumstances(findings),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _figures(charts: Mapping[str, ChartFiles]) -> Iterator[str]:
    """A trace's own arrivals have no axis, hence no chart."""
    if charts:
        yield "<h2>Figures</h2><div class='charts'>"
        yield from (f"<figure>{chart.svg}</figure>" for chart in charts.values())
        yield "</div>"


def _top(findings: Findings) -> Iterator[str]:
    analysis = findings.analysis
    yield (
        f"<p class='faint'>baton bench architectures · {escape(findings.workload)}: "
        f"{escape(findings.workload_words)} · {escape(findings.engine)} · "
        f"{escape(findings.model)} · {findings.num_workers} workers · "
        f"{findings.num_repetitions} repetitions · {escape(findings.manifest.started_at)}</p>"
    )
    if findings.is_partial:
        yield f"<p class='partial'>PARTIAL: {escape(findings.ended or '')}</p>"
    what, _, why = analysis.headline.partition(": ")
    yield f"<div class='verdict'><h1>{escape(what)}</h1><p class='why'>{escape(why)}.</p><ul>"
    yield from (f"<li>{escape(line)}</li>" for line in analysis.verdict)
    yield (
        f"<li class='faint'>SLO ({escape(analysis.slo_words)}): {escape(describe_slo(findings))}."
        "</li></ul></div>"
    )


def _cautions(findings: Findings) -> Iterator[str]:
    doubts = (*findings.analysis.cautions, *findings.warnings)
    if doubts:
        yield "<div class='caution'><strong>What makes these figures doubtful</strong><ul>"
        yield from (f"<li>{escape(line)}</li>" for line in doubts)
        yield "</ul></div>"


def _circumstances(findings: Findings) -> Iterator[str]:
    machine = findings.manifest.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    has_energy = any(cell.energy_j is not None for cell in findings.cells)
    lines = [
        f"command     baton {' '.join(findings.manifest.command)}",
        f"baton       {findings.manifest.baton}",
        f"machine     {machine.host}: {machine.cpu}, {machine.num_cpus} cores",
        f"memory      {machine.memory_bytes / 2**30:.1f} GiB, Linux {machine.kernel}",
        f"versions    Python {machine.python}, {versions}",
        f"load        before {machine.load}, after {findings.manifest.load_after}",
        f"energy      {'of the whole machine, by RAPL or NVML' if has_energy else UNMEASURED}",
        f"seed        {findings.seed}",
        f"each load   {findings.duration_s:g} s, after {findings.settle_s:g} s that do not count",
        f"order       {', '.join(findings.order)}",
        *(
            f"{configuration.name:11} "
            + ", ".join(
                f"{name} on cores {list(cores)}" for name, cores in configuration.cores.items()
            )
            for configuration in findings.configurations
        ),
    ]
    yield f"<h2>Circumstances</h2><pre>{escape(chr(10).join(lines))}</pre>"
    yield (
        "<p class='faint'>Every request's record: runs/ARM/LOAD/rep-N.json, each a report of "
        "<code>baton bench serve</code>; <code>baton bench compare runs/replicated/c8 "
        "runs/1P1D/c8</code> holds two against each other. Method and limits: "
        "docs/fair-benchmark.md.</p>"
    )
