"""The tables of the HTML page. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from baton.bench.architectures.charts import colour_of, show
from baton.bench.architectures.metrics import measured_metrics
from baton.bench.architectures.verdict import describe_change

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.bench.architectures.results import Cell, Contrast, Estimate, Findings, Proof


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], num_names: int = 2) -> Iterator[str]:
    """`rows` are HTML already; a new first word begins a new group."""
    yield "<div class='scroll'><table><tr>"
    for i, word in enumerate(head):
        yield f"<th class='{'name' if i < num_names else ''}'>{escape(word)}</th>"
    yield "</tr>"
    before = ""
    for row in rows:
        yield f"<tr class='{'first' if row[0] != before else ''}'>"
        for i, cell in enumerate(row):
            yield f"<td class='{'name' if i < num_names else ''}'>{cell}</td>"
        yield "</tr>"
        before = row[0]
    yield "</table></div>"


def show_results(findings: Findings) -> Iterator[str]:
    """Every metric of every arm and load, against replication."""
    points = {(p.metric, p.arm, p.level): p.estimate for p in findings.analysis.points}
    against = {(c.metric, c.arm, c.level): c for c in findings.analysis.contrasts}
    metrics, rows = measured_metrics(findings.cells), []
    for level in findings.levels:
        for place, arm in enumerate(findings.arms):
            row = [escape(level.words), _arm(place, arm.name)]
            for metric in metrics:
                key = (metric.key, arm.name, level.key)
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
    text = "-" if estimate is None else show(estimate.mean)
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        half = show((estimate.high - estimate.low) / 2)
        text += f"<span class='small undecided'>± {half}</span>"
    if contrast is not None and contrast.ratio is not None:
        change = escape(describe_change(contrast))
        text += f"<span class='small {contrast.judgement}'>{change}</span>"
    return text


def _arm(place: int, name: str) -> str:
    return f"<span class='dot' style='background:{colour_of(place)}'></span>{escape(name)}"


def show_proofs(findings: Findings) -> Iterator[str]:
    """What KV was needed, and what was received."""
    rows = []
    for place, arm in enumerate(findings.arms):
        for level in findings.levels:
            cells = _cells(findings, arm.name, level.key)
            proofs = [cell.proof for cell in cells if cell.proof is not None and cell.is_usable]
            if proofs:
                rows.append([_arm(place, arm.name), escape(level.words), *_proof_words(proofs)])
    if rows:
        yield "<h2>Did KV really move?</h2><p class='faint'>From the traces of every answered "
        yield "request, warm-up included: tokens whose KV decode lacked (prompt less cached), and "
        yield "tokens whose KV it received. (Where less than a block is lacking after cached ones, "
        yield "decode computes it itself, by design.) Of a peer: what its own metrics say, in "
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
    unknown = any(proof.told_by == "nobody" for proof in proofs)
    yield "not shown by the peer" if unknown else escape(f"{modes} / {transports}")


def _cells(findings: Findings, arm: str, level: str) -> list[Cell]:
    return [cell for cell in findings.cells if (cell.arm, cell.level) == (arm, level)]


def show_stages(findings: Findings) -> Iterator[str]:
    """Stages of a request, and who used the cores."""
    rows = []
    for level in findings.levels:
        for place, arm in enumerate(findings.arms):
            cells = _cells(findings, arm.name, level.key)
            if cells:
                rows.append([escape(level.words), _arm(place, arm.name), *_stage_words(cells)])
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
        yield show(sum(known) / len(known) * 1e3) if known else "-"
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
    """Input and output apart; nothing where no price was given."""
    if not findings.analysis.costs:
        return
    places = {arm.name: place for place, arm in enumerate(findings.arms)}
    words = {level.key: level.words for level in findings.levels}
    rows = [
        [
            escape(words[cost.level]),
            _arm(places[cost.arm], cost.arm),
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
    yield "<h2>Cost of 1,000 tokens</h2><p class='faint'>The first two each hold an arm's whole "
    yield "cost: compare them between arms, do not add them. The last two are shares: prefill "
    yield "workers by input, decode workers by output.</p>"
    head = ("load", "arm", "whole / 1,000 input", "whole / 1,000 output",
            "prefill workers / 1,000 input", "decode workers / 1,000 output")  # fmt: skip
    yield from _table(head, rows)
