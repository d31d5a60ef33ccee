"""`baton bench`: how fast links, servers and architectures are, and whether a difference is real.

    link/            every transport between two processes (baton.rig), and how it compares
    load/            `baton bench serve`: a load generator; workloads/: its requests
    replay/          `baton route replay`: a workload under several policies, in virtual time
    compare.py       two reports of `baton bench serve`: is one really better?
    route_costs.py   results of serve and link → what a gateway begins with
    architectures/   the same workers, used in every way: is disaggregation worth it?

Shared by them:
    statistics.py    intervals, tests, crossovers (SciPy)
    printing.py      every table; charts.py: every figure (matplotlib)
    progress.py      what a terminal shows meanwhile
    files.py         results → files, and the circumstances of a run
"""
