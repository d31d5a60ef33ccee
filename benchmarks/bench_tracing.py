"""What tracing costs a gateway and a worker: thread time of its parts, for one request.

    python benchmarks/bench_tracing.py --json benchmarks/results/tracing.json
    python benchmarks/bench_tracing.py --cpu transformers --json FILE
    python benchmarks/bench_tracing.py --cpu vllm --json FILE

Parts run in turns, `ROUNDS` times; the median of a round's mean. `before`: what was recorded before
these parts existed (a span, four stamps, the ring of records). A request is not kept: it is neither
slow nor failed. Each answer has `--tokens` tokens.

`--cpu`: also a real fleet of that engine, and which part of a request's CPU time all telemetry is
(`tracing_cpu.py`). Single assignments to a trace, which are not functions, are added as the parts
`stages`, `spans`, `layers` and `tokens` have them: `unseen_us`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from rich.console import Console
from rich.table import Table
from run_record import write_record
from tracing_cpu import ENGINES, NUM_TOKENS, measure_cpu

from baton.clock import Instant
from baton.gateway.request_context import RequestContext
from baton.gateway.request_history import RequestHistory
from baton.gateway.tail_sampling import HeadSampler, TailSampler
from baton.ids import RequestId, WorkerId
from baton.router.load import FleetLoad
from baton.telemetry.trace import MOST_TOKEN_GAPS, PredictedTimes, RequestSpan, Stamp
from baton.telemetry.trace_context import begin_span, parse_traceparent, read_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracing_cpu import CpuFigures

    from baton.gateway.metrics import ModelMetrics
    from baton.router.fleet import WorkerView

ROUNDS: Final = 15
NUM: Final = 2000
HEADERS: Final = (
    (b"host", b"gateway:8000"), (b"user-agent", b"openai"), (b"accept", b"*/*"),
    (b"content-type", b"application/json"), (b"content-length", b"2048"),
    (b"authorization", b"Bearer key"), (b"x-request-id", b"req-1"),
)  # fmt: skip
PARENT: Final = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
WITH_PARENT: Final = (*HEADERS, (b"traceparent", PARENT), (b"tracestate", b"vendor=1"))
WORKER: Final = cast("WorkerView", type("View", (), {"id": WorkerId("w"), "model": "m"}))


def make_span() -> RequestSpan:
    """As a gateway makes it."""
    return RequestSpan(request_id="req-1", worker="gateway", epoch="e", role="gateway")


class Gateway:
    """The parts of a gateway, each as it is called for one request."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._clock = time.monotonic
        self._head = HeadSampler(0.01)
        self._tail = TailSampler(0.99, None)
        self._records = RequestHistory(1024)
        self._activity = FleetLoad().of(WORKER.id, WORKER.model)
        self._request = self._context()

    def _context(self) -> RequestContext:
        context = RequestContext(
            id=RequestId("req-1"),
            path="/v1/completions",
            received_at=Instant(0.0),
            deadline=Instant(9.0),
            forwarded_headers=b"",
            trace=make_span(),
            metrics=cast("ModelMetrics", None),
        )
        for at, stamp in enumerate((Stamp.RECEIVED, Stamp.FIRST_TOKEN)):
            context.trace.stamp(stamp, float(at))
        return context

    def before(self) -> None:
        """A span, its stamps, its record."""
        now, trace = self._clock, make_span()
        for stamp in (Stamp.RECEIVED, Stamp.ADMITTED, Stamp.FIRST_TOKEN, Stamp.FINISHED):
            trace.stamp(stamp, now())
        self._request.trace = trace
        self._records.add(self._request.finish(200, Instant(1.0)))

    def new_trace(self) -> None:
        """Ids, and the headers for workers, of a request without a trace."""
        span = begin_span(read_context(HEADERS), is_sampled=self._head.next())
        span.headers  # noqa: B018 - it is computed

    def clients_trace(self) -> None:
        """The same in a client's trace."""
        span = begin_span(read_context(WITH_PARENT), is_sampled=self._head.next())
        span.headers  # noqa: B018 - it is computed

    def stages(self) -> None:
        """Three more instants, with their clock reads."""
        now, trace = self._clock, self._request.trace
        trace.stamps[Stamp.TOKENIZED] = now()
        trace.stamps[Stamp.DEQUEUED] = now()
        trace.stamps[Stamp.PLACED] = now()

    def spans(self) -> None:
        """A span for each of the three processes."""
        for _ in range(3):
            make_span()

    def layers(self) -> None:
        """The instants of 32 layers, ready and landed."""
        ready, landed = [0.0] * 32, [0.0] * 32
        for layer in range(32):
            ready[layer] = 1.0
            landed[layer : layer + 1] = [1.0] * 1

    def predict(self) -> None:
        """The router's prediction, of a handoff."""
        began, activity = max(0.0, self._activity.free_at), self._activity
        PredictedTimes(
            queue_s=began - 1.0,
            load_s=activity.free_at - began,
            prefill_s=activity.free_at - began,
            handoff_s=activity.load_cost.predict(100),
        )

    def end(self) -> None:
        """Decide that a request is not kept, and pack the gaps of its tokens."""
        self._tail.look(self._request.finish(200, Instant(2.0)))

    def tokens(self) -> None:
        """The gap of each token, as `ResponseForwarder` appends it."""
        gaps = self._request.open_token_gaps()
        del gaps[:]
        append = gaps.append
        for num in range(self._num_tokens):
            if num < MOST_TOKEN_GAPS:
                append(0.01)


def read_parent() -> None:
    """A worker's part: the header, and a step of prefill."""
    parse_traceparent(PARENT)
    make_span().note_chunk(1.0, 2.0, 512)


def measure(parts: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds of each part."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS):
        for name, part in parts.items():
            began = time.thread_time()
            for _ in range(NUM):
                part()
            found[name].append((time.thread_time() - began) / NUM * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cpu", choices=ENGINES, help="measure a fleet of this engine, too")
    parser.add_argument("--rounds", type=int, default=12, help="of --cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gateway = Gateway(arguments.tokens)
    found = measure({
        "before": gateway.before,
        "new trace": gateway.new_trace,
        "client's trace": gateway.clients_trace,
        "stages": gateway.stages,
        "spans": gateway.spans,
        "layers": gateway.layers,
        "prediction": gateway.predict,
        "tokens": gateway.tokens,
        "end": gateway.end,
        "worker": read_parent,
    })
    added = ("client's trace", "stages", "prediction", "end")
    totals = {
        "added_us": sum(found[name] for name in added),
        "token_us": found["tokens"] / arguments.tokens,
    }
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("us", justify="right")
    for name, microseconds in {**found, **totals}.items():
        table.add_row(name, f"{microseconds:.2f}")
    Console().print(table)
    cpu = None
    if arguments.cpu is not None:
        figures = measure_cpu(arguments.cpu, arguments.rounds)
        unseen_us = sum(found[name] for name in ("stages", "spans", "layers"))
        unseen_us += totals["token_us"] * NUM_TOKENS
        cpu = {"figures": figures, "unseen_us": unseen_us}
        show_cpu(figures, unseen_us)
    write_record(arguments.json, parts_us=found, **totals, num_tokens=arguments.tokens, cpu=cpu)


def show_cpu(figures: CpuFigures, unseen_us: float) -> None:
    """A row of the table in docs/observability/traces.md, and what it was made from."""
    request_ms, seen_us = sum(figures.request_ms.values()), sum(figures.telemetry_us.values())
    share = figures.share + unseen_us / 1e3 / request_ms
    low, high = (100 * each for each in figures.share_quartiles)
    added_low, added_high = (100 * each for each in figures.added_share_quartiles)
    print(
        f"| {figures.engine} | {request_ms:.0f} ms | {seen_us:.0f} us + {unseen_us:.0f} us "
        f"| {100 * share:.2f} % ({low:.2f} to {high:.2f}) "
        f"| {100 * figures.added_share:+.1f} % ({added_low:+.1f} to {added_high:+.1f}) "
        f"| {sum(figures.idle_us_per_s.values()):.0f} us |"
    )
    for name, taken_us in figures.functions_us.items():
        print(f"  {taken_us:8.2f} us {name}")


if __name__ == "__main__":
    main()
