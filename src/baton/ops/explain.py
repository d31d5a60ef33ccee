"""`baton explain`: one request as a waterfall in the terminal, with what was predicted of it.

Names, reasons and errors come from clients and workers: none of them may steer the terminal.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.ops.doctor.finding import one_line
from baton.telemetry.timeline import Lane, LayerTransfer, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.protocol.request_traces import RequestTrace

LEFT_CHARS: Final = 72
"""Of the columns before the bars."""
MIN_BAR_CHARS: Final = 12
COLORS: Final = {"gateway": "cyan", "prefill": "yellow", "transfer": "magenta", "decode": "green"}
BEYOND_FIRST: Final = 1.1
"""How far an axis that ends at the first token goes beyond it."""


def print_trace(
    trace: RequestTrace, out: TextIO, *, until_first_token: bool = False, with_layers: bool = False
) -> None:
    """Facts, the waterfall, prediction against outcome, and the router's reasons."""
    console = Console(file=out, markup=False, highlight=False)
    for line in _facts(trace):
        console.print(one_line(line), soft_wrap=True)
    axis = _Axis.of(
        trace, max(MIN_BAR_CHARS, console.width - LEFT_CHARS), until_first_token=until_first_token
    )
    console.print(_waterfall(trace, axis, with_layers=with_layers))
    for line in _clocks(trace):
        console.print(one_line(line), soft_wrap=True)
    if trace.compared:
        console.print(_predictions(trace))
    else:
        console.print("The router predicted nothing of it.")
    for line in trace.placement:
        console.print(f"router: {one_line(line)}", soft_wrap=True)


def _facts(trace: RequestTrace) -> Iterator[str]:
    gateway, summary = trace.gateway, trace.summary
    where = gateway.peer or "no worker"
    yield f"{trace.id}: {trace.status}, {gateway.outcome or 'running'}; {trace.model}"
    yield f"{where}, {gateway.mode or 'not placed'}" + (
        f", {trace.distance}" if trace.distance else ""
    )
    if trace.kept is not None:
        yield f"kept: {trace.kept}"
    if gateway.trace_id:
        yield f"trace id {gateway.trace_id}"
    if summary is not None:
        yield (
            f"{summary.num_prompt_tokens} prompt tokens: {summary.num_cached_tokens} cached, "
            f"{summary.num_received_tokens} received; {summary.num_output_tokens} generated"
        )
        if summary.transport is not None:
            expected = summary.expected_transport
            is_other = expected not in {None, summary.transport}
            used = f"NOT {expected} as expected" if is_other else "as expected"
            verified_s = 0.0 if trace.decode is None else trace.decode.verify_s
            yield (
                f"{summary.num_bytes} bytes in {summary.num_pages} pages over "
                f"{summary.transport}, {used}; verified in {_milliseconds(verified_s)}"
            )
    if trace.lost_share is not None:
        yield f"{trace.lost_share:.2%} of the TCP segments between the two were lost in that minute"
    if trace.layers:
        longest = max(trace.layers, key=_took_s)
        yield (
            f"layers from computed to landed: {len(trace.layers)}, "
            f"median {_milliseconds(median(map(_took_s, trace.layers)))}, "
            f"longest {_milliseconds(_took_s(longest))} (layer {longest.layer})"
        )
    if trace.token_gaps is not None:
        gaps = trace.token_gaps
        yield (
            f"between tokens: mean {_milliseconds(gaps.mean_s)}, p50 {_milliseconds(gaps.p50_s)}, "
            f"p99 {_milliseconds(gaps.p99_s)}, longest {_milliseconds(gaps.max_s)} "
            f"(of the first {gaps.num})"
        )
    notes = (*gateway.fallbacks, *gateway.moves, *(summary.fallbacks if summary else ()))
    yield from (f"fallback: {each}" for each in dict.fromkeys(notes))
    yield from (f"no trace of {each}: it was forgotten, or it restarted" for each in trace.missing)


def _took_s(layer: LayerTransfer) -> float:
    return layer.landed_s - layer.ready_s


def _waterfall(trace: RequestTrace, axis: _Axis, *, with_layers: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column("where", no_wrap=True, max_width=20, overflow="ellipsis")
    table.add_column("stage", no_wrap=True, max_width=22, overflow="ellipsis")
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for lane in trace.timeline:
        who = one_line(lane.worker)
        layers = [
            Stage(f"layer {each.layer}", each.ready_s, each.landed_s, is_part=True)
            for each in (trace.layers if with_layers and lane.name == "transfer" else ())
        ]
        for stage in (*lane.stages, *layers):
            name = f"  {one_line(stage.name)}" if stage.is_part else one_line(stage.name)
            took_s = stage.end_s - stage.start_s
            bar = Text(axis.draw(stage), style=_color(lane, stage))
            table.add_row(who, name, _milliseconds(stage.start_s), _milliseconds(took_s), bar)
            who = ""
    return table


class _Axis:
    """The time from `start_s` to `end_s`, as `num_chars` characters."""

    def __init__(self, start_s: float, end_s: float, num_chars: int) -> None:
        self._start_s, self._num_chars = start_s, num_chars
        self._chars_per_s = num_chars / max(end_s - start_s, 1e-9)

    @classmethod
    def of(cls, trace: RequestTrace, num_chars: int, *, until_first_token: bool) -> _Axis:
        """Over all lanes, or until the first token."""
        lanes = trace.timeline
        start_s = min((lane.start_s for lane in lanes), default=0.0)
        end_s = max((lane.end_s for lane in lanes), default=0.0)
        first_s = None if trace.summary is None else trace.summary.first_token_s
        if until_first_token and first_s is not None:
            end_s = min(end_s, BEYOND_FIRST * first_s)
        return cls(start_s, end_s, num_chars)

    def draw(self, stage: Stage) -> str:
        """A bar: at least one character, unless it begins beyond the end."""
        begin = int((stage.start_s - self._start_s) * self._chars_per_s)
        end = int((stage.end_s - self._start_s) * self._chars_per_s)
        if begin >= self._num_chars:
            begin = self._num_chars if stage.end_s > stage.start_s else self._num_chars - 1
        length = max(1, end - begin)
        block = "▒" if stage.is_part else "█"
        return (" " * begin + block * length)[: self._num_chars]


def _color(lane: Lane, stage: Stage) -> str:
    return "red" if stage.name == "exposed transfer" else COLORS[lane.name]


def _clocks(trace: RequestTrace) -> Iterator[str]:
    """How far each worker's times may be off."""
    for lane in trace.timeline:
        if lane.name in {"gateway", "transfer"}:
            continue
        if lane.clock is None:
            yield (
                f"The clock of {lane.worker} is not known here: its stages are drawn from the "
                "request's placement on."
            )
        elif lane.clock.error_s > 0:
            yield f"Times of {lane.worker} are right to within {_milliseconds(lane.clock.error_s)}."


def _predictions(trace: RequestTrace) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("part", no_wrap=True)
    for heading in ("predicted", "happened", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in trace.compared:
        actual_s = each.actual_s
        known = ("", "") if actual_s is None else (
            _milliseconds(actual_s), _milliseconds(actual_s - each.predicted_s)
        )  # fmt: skip
        table.add_row(each.part, _milliseconds(each.predicted_s), *known)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
