"""`baton bench link`: the speed of every transport between two processes, and what it costs in CPU.

Enters: transports, peers, sizes, and two places. Leaves: a report (docs/bench-link.md).

Each round starts a new pair of processes (baton.rig) for each backend, so that one pair runs at a
time and all see the same noise; bytes are verified before they are timed.

File map:
    runner.py    which backends and workloads; rounds
    report.py    samples → rows, and what `--json` prints (pure)
    listen.py    `--listen`: processes for a runner on another host
    node.py      the measured process; backends/: upper limits and other projects' engines
"""
