"""Arms that are not Baton's: other ways to serve the same model from the same workers.

Enters: an arm and how Baton's own workers of that arm would start. Leaves: servers that answer on
one URL, pinned to the same cores, and what they themselves say of KV that moved.

File map:
    plan.py        which processes, with which arguments (pure)
    installed.py   whether a peer's packages are there, and how to get them
    process.py     one process: spawn, lines, end
    pinning.py     every thread on its share, whatever a peer has done
    fleet.py       all of an arm, from start to stop
    proxy.py       a process: prefill first, then decode, as vLLM's connectors want it
    counters.py    vLLM's metrics before and after → proof that KV moved
"""
