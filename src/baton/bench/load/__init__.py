"""`baton bench serve`: a load generator for any server with OpenAI's API.

Enters: a server's address, a workload (baton.bench.workloads), a concurrency or a rate.
Leaves: a record of every request, figures, and whether this client was itself the bottleneck.

    server check ─► which model, token ids or words, does the largest request fit   server_check.py
    runner ─► closed or open loop, warm-up, deadline, drain                         runner.py
       └─ client ─► one request: bytes ─► SSE events ─► a stream's state ─► `Record`

As a library: `open_target`, `check_server`, `LoadRunner(...).run()`, `compute_figures`.

File map:
    plan.py          closed or open loop, arrival times, limits (pure)
    client.py        the server's address, request bodies, one request over HTTP
    stream.py        bytes → SSE events → the result of an answer (pure)
    server_check.py  checks before a run: what cannot work fails here
    sender.py        sends one phase's requests; stops when the server is gone
    runner.py        the run, and the client's own CPU, event loop and lateness
    records.py       requests as they are saved → figures (pure)
    job.py           from flags to the report that `--json` prints
"""
