"""What is measured: the trace of one request, and a worker's instruments. No HTTP here.

Enters: instants and facts from gateway, engine and handoff agent. Leaves: `TraceSummary`, and
Prometheus samples in a registry of the caller's.

File map:
    trace.py           `RequestSpan`: what one process recorded; `TraceRing`: the last ones;
                       `summarize`: spans of one request → durations and facts, pure
    trace_context.py   W3C `traceparent` and `tracestate`, read and written
    clock_offset.py    how far another process's clock is from ours, by round trips; pure
    trace_merge.py     one span of what several processes recorded of a request; pure
    timeline.py        a request's spans on one time axis; prediction beside outcome; pure
    process_status.py  what a process reports to its launcher
    log_limit.py       `LimitedLog`: lines that any client can cause
    log_histogram.py   `LogHistogram`: mergeable, quantiles within 1 %
    metrics.py         `WorkerMetrics`: requests of a worker, as Prometheus counts them
    handoff_metrics.py `HandoffInstruments`: its handoffs, by distance, transport, mode, operation
    links.py           `LinkInstruments`: its links, predicted and observed
    drift.py           drift of one link: slower than it was at first
    transfers.py       `TransferTable`: handoffs and links by peer
    transfer_report.py `TransferReport`: that table, as the gateway reads it
"""
