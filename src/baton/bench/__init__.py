"""`baton bench link`: how fast bytes move between two workers, by which way, and at which price.

Enters: which transports, peers, sizes, and two places. Leaves: a report (docs/bench-link.md).

    conductor (this process)  ──orders──►  driver   starts and times every transfer   pool A
                              ──orders──►  owner    helps where help is needed        pool B

Every round starts a fresh pair of processes for each contender, so that only one pair runs at a
time and all see the same weather; bytes are verified before they are timed.

File map:
    workload.py      what is moved, and where its pages lie (pure)
    plan.py          which contenders and workloads (pure)
    conducting.py    rounds; progress.py: what the person sees meanwhile
    pair.py          two processes and one contender: set up, verify, measure
    ends.py          where the processes come from: children, or listening ends (listening.py)
    orders.py        what they are told, over channel.py
    part.py          the measured process; namespace.py: a network of its own
    contender.py     the seam: over_transport.py (the registry's), copying.py and sockets.py (the
                     limits), peers/ (other projects); building.py: name → contender
    choice/          `--choice`: surveys by bare_worker.py, and what is chosen by them
    pool.py          random bytes; machine.py: the host and versions
    figures.py       samples → figures (pure); report.py: rows, and what `--json` prints
    printing.py      the table; plotting.py: the figure

Beside it, for servers under load (each has a file map of its own):
    load/            `baton bench serve`: a load generator; workloads/: what it asks
    comparing/       `baton bench compare`: two of its reports
    architectures/   `baton bench architectures`: the same workers, used in every way
    agreement/       `baton bench compare`: two architecture results
    live.py          the live line of runs under load
    manifest.py      circumstances of a run; saving.py: results → files
"""
