"""What tracing costs a gateway and a worker: thread time of its parts, for one request.

    python benchmarks/bench_tracing.py --json benchmarks/results/tracing.json

Parts run in turns, `ROUNDS` times; the median of a round's mean. `before`: what was recorded before
these parts existed (a span, four stamps, the ring of records). A request is not kept: it is neither
slow nor failed. Each answer has `--tokens` tokens.
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

from baton.clock import Instant
from baton.gateway.request_context import RequestContext
from baton.gateway.request_traces import RequestHistory
from baton.gateway.tail_sampling import HeadSampler, TailSampler
from baton.ids import RequestId, WorkerId
from baton.router.load import FleetLoad
from baton.telemetry.trace import MOST_TOKEN_GAPS, PredictedTimes, RequestSpan, Stamp
from baton.telemetry.trace_context import begin_span, parse_traceparent, read_context

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._records.add(self._request.make_record(200, Instant(1.0)))

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
        context = self._request
        context.trace.stamps[Stamp.FINISHED] = 2.0
        context.finish(Instant(2.0))
        self._tail.look(context.make_record(200, Instant(2.0)))

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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gateway = Gateway(arguments.tokens)
    found = measure({
        "before": gateway.before,
        "new trace": gateway.new_trace,
        "client's trace": gateway.clients_trace,
        "stages": gateway.stages,
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
    write_record(arguments.json, parts_us=found, **totals, num_tokens=arguments.tokens)


if __name__ == "__main__":
    main()
