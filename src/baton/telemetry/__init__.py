"""What is measured: the trace of one request, and a worker's instruments. No HTTP here.

Enters: instants and facts from gateway, engine and handoff agent. Leaves: `TraceSummary`, and
Prometheus samples in a registry of the caller's.

File map:
    trace.py           `RequestSpan`: what one process recorded; `TraceRing`: the last ones;
                       `summarize`: spans of one request → durations and facts, pure
    trace_context.py   W3C `traceparent` and `tracestate`, read and written
    clock_offset.py    how far another process's clock is from ours, by round trips; pure
    timeline.py        a request's spans on one time axis; prediction beside outcome; pure
    process_status.py  what a process reports to its launcher
    log_limit.py       `LimitedLog`: lines that any client can cause
    metrics.py         `WorkerMetrics`: counters and histograms, every label pre-registered at 0
"""
