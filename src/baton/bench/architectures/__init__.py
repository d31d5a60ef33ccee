"""`baton bench architectures`: with a fixed number of workers, which architecture serves better?

Enters: a model, a number of workers, a workload, loads. Leaves: a verdict in words, with intervals;
a table, JSON, figures and one HTML page; every run of the load generator as a file of its own.

    plan ─► turns: (repetition, arm), shuffled by seed                       plan.py, arms.py
      turn ─► servers start (baton.launch) ─► each load ─► servers stop      turning.py, fleet.py
        cell ─► load generator (baton.bench.load) ─► figures, CPU, proof     cells.py
    cells ─► intervals, crossover ─► words ─► table, page              analysing.py, verdict.py

File map:
    arms.py         single, replicated, each split into prefill and decode (pure)
    plan.py         what is measured, in which order (pure)
    fleet.py        one arm's servers, from start to stop; peers/: those that are not Baton's
    opening.py      an arm's plan → its servers, whoever's
    usage.py        CPU time of processes and machine, from /proc; energy.py: RAPL and NVML
    witness.py      who tells what happened; tracing.py: Baton's traces: did KV move, where did
                    time go
    cells.py        one arm under one load, once
    turning.py      one arm's turn: servers, every load, end
    conducting.py   all turns; results are kept as they come
    results.py      what the JSON has
    keeping.py      the folder of results
    progress.py     where the benchmark is
    statistics.py   paired ratios, crossover (pure, seeded)
    metrics.py      which figures are compared (pure)
    analysing.py    cells → analysis (pure)
    verdict.py      analysis → words (pure)
    charts.py       a chart as SVG (pure); drawing.py: which charts there are
    page.py         the HTML page (pure); tables.py: its tables
    printing.py     the terminal's table; delivering.py: findings → terminal and files
"""
