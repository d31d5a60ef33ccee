"""What is measured: the trace of one request, and a worker's instruments. No HTTP here.

Enters: instants and facts from gateway, engine and handoff agent. Leaves: `TraceSummary`, and
Prometheus samples in a registry of the caller's.

File map:
    trace.py         `LegTrace`: what one process recorded; `TraceRing`: the last ones it remembers
    summary.py       `summarize`: legs of one request → durations and facts, pure
    announcement.py  what a process tells its launcher
    metrics.py       `WorkerMetrics`: counters and histograms, every label pre-registered at 0
"""
