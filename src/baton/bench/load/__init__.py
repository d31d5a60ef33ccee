"""`baton bench serve`: a load generator for any server that speaks OpenAI's API.

Enters: a server's address, a workload (baton.bench.workloads), how much of it at once or a second.
Leaves: a record of every request, figures, and whether this client was itself the bottleneck.

    survey ─► which model, does it take token ids, does the largest request fit     surveying.py
    conductor ─► closed or open loop, warm-up, deadline, drain                      conducting.py
       └─ client ─► one request: bytes ─► SSE events ─► a stream's state ─► `Record`

As a library: `open_target`, then `check_server`, then `Conductor(...).conduct()`, then `compute_figures`.

File map:
    target.py       where the server is, and its key
    bodies.py       an ask → a request's bytes (pure)
    sse.py          bytes → events (pure)
    stream.py       events → what became of an answer (pure)
    record.py       one request, as it is kept; files of them
    client.py       one request over HTTP
    surveying.py    what must be known before a run; what cannot work is refused here
    schedule.py     when requests are sent (pure)
    breaker.py      when going on makes no sense (pure)
    plan.py         closed or open loop, and when it ends
    conducting.py   the run
    watching.py     the client's own part: event loop, CPU, lateness
    figures.py      records → figures (pure)
    report.py       what `--json` prints; saving.py: files that survive a full disk
    printing.py     the table; progress.py: the live line
"""
