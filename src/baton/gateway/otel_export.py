"""Sends traces to an OpenTelemetry collector, over OTLP/HTTP, on a thread of its own.

The queue is bounded and nothing waits for it: a collector that is slow or absent loses traces,
which are counted, and delays no request.
"""

from __future__ import annotations

import logging
import queue
import threading
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from baton.clock import Clock
    from baton.gateway.trace_metrics import TraceMetrics
    from baton.protocol.request_traces import RequestTrace

QUEUE_SIZE: Final = 512
"""Traces: a few MB at most."""
MOST_AT_ONCE: Final = 32
TIMEOUT_S: Final = 5.0
"""Of one request to the collector, attempts included."""
CLOSE_S: Final = 2.0
LOG_EVERY_S: Final = 60.0
EXPORTER_LOGGER: Final = "opentelemetry.exporter.otlp"

log = logging.getLogger(__name__)


class SpanExport:
    """`offer` belongs to the event loop's thread, all else to the export's own."""

    def __init__(
        self,
        exporter: SpanExporter,
        make_spans: Callable[[RequestTrace], list[ReadableSpan]],
        endpoint: str,
        *,
        metrics: TraceMetrics,
        clock: Clock,
    ) -> None:
        self._exporter, self._make_spans, self._endpoint = exporter, make_spans, endpoint
        self._metrics, self._log = metrics, LimitedLog(log, clock, LOG_EVERY_S)
        self._queue: queue.Queue[RequestTrace | None] = queue.Queue(QUEUE_SIZE)
        self._thread = threading.Thread(target=self._run, name="otel-export", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def offer(self, trace: RequestTrace) -> None:
        """Send a trace soon, unless too many wait already. Returns at once."""
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._metrics.lost["queue"].inc()

    def close(self) -> None:
        """Send what waits, for at most `CLOSE_S`."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.info("traces that wait for %s are dropped at the end", self._endpoint)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            traces, is_last = [first], False
            while len(traces) < MOST_AT_ONCE and not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    is_last = True
                    break
                traces.append(more)
            self._send(traces)
            if is_last:
                break
        self._exporter.shutdown()

    def _send(self, traces: list[RequestTrace]) -> None:
        try:
            spans = [span for trace in traces for span in self._make_spans(trace)]
            is_sent = not spans or self._exporter.export(spans).name == "SUCCESS"
        except Exception:
            log.exception("%d traces cannot be sent to %s", len(traces), self._endpoint)
            is_sent = False
        if is_sent:
            self._metrics.exported.inc(len(traces))
            return
        self._metrics.lost["collector"].inc(len(traces))
        self._log.warning(
            "collector",
            f"{self._endpoint} did not accept {len(traces)} traces, which are lost: is the "
            "collector running, and does it take OTLP over HTTP (usually at port 4318)?",
        )


def open_export(endpoint: str, metrics: TraceMetrics, clock: Clock) -> SpanExport:
    """An export to `endpoint`, a whole URL such as `http://127.0.0.1:4318/v1/traces`; not started.

    The SDK's own environment variables (`OTEL_EXPORTER_OTLP_HEADERS`, `…_CERTIFICATE`) hold.

    Raises:
        ConfigError: OpenTelemetry is not installed, or damaged by another package.
    """
    try:
        # An extra, and 0.2 s to import.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )

        from baton.gateway.otel_mapping import make_spans  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"trace.otlp_endpoint is set and {exc.name} is not installed: "
            "pip install 'baton-kv[otel]'"
        ) from exc
    except ImportError as exc:
        raise ConfigError(
            f"trace.otlp_endpoint is set and OpenTelemetry cannot be imported ({exc}): xds-protos, "
            "which `baton picker` needs, may have replaced modules of opentelemetry-proto with its "
            "own. Run: pip install --force-reinstall --no-deps opentelemetry-proto=="
            f"{version('opentelemetry-proto')}"
        ) from exc
    # It logs each attempt; what is lost is counted here, and logged once a minute.
    logging.getLogger(EXPORTER_LOGGER).setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
    return SpanExport(exporter, make_spans, endpoint, metrics=metrics, clock=clock)
