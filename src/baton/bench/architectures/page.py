"""Findings → one HTML page that needs nothing else: no network, no script. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from baton.bench.architectures.energy import UNMEASURED
from baton.bench.architectures.printing import describe_slo
from baton.bench.architectures.tables import show_costs, show_proofs, show_results, show_stages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from baton.bench.architectures.results import Findings

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


def write_page(findings: Findings, charts: Mapping[str, str]) -> str:
    """The whole page; `charts` are SVG documents by name."""
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


def _figures(charts: Mapping[str, str]) -> Iterator[str]:
    """None where all loads are a trace's own arrivals: there is no axis to draw them along."""
    if charts:
        yield "<h2>Figures</h2><div class='charts'>"
        yield from (f"<figure>{svg}</figure>" for svg in charts.values())
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
    said = (*findings.analysis.cautions, *findings.warnings)
    if said:
        yield "<div class='caution'><strong>What makes these figures doubtful</strong><ul>"
        yield from (f"<li>{escape(line)}</li>" for line in said)
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
        f"each load   {findings.duration_s:g} s",
        f"order       {', '.join(findings.order)}",
        *(
            f"{arm.name:11} "
            + ", ".join(f"{name} on cores {list(cores)}" for name, cores in arm.cores.items())
            for arm in findings.arms
        ),
    ]
    yield f"<h2>Circumstances</h2><pre>{escape(chr(10).join(lines))}</pre>"
    yield (
        "<p class='faint'>Every request's record: runs/ARM/LOAD/rep-N.json, each a report of "
        "<code>baton bench serve</code>; <code>baton bench compare runs/replicated/c8 "
        "runs/1P1D/c8</code> holds two against each other. Method and limits: "
        "docs/fair-benchmark.md.</p>"
    )
