"""`baton bench architectures`: which use of a fixed number of workers serves better?

Enters: a model, a number of workers, a workload, loads. Leaves: a verdict with intervals, a table,
JSON, figures and one HTML page; every run of the load generator as a file of its own.

    plan ─► trials: (repetition, configuration), shuffled by seed               plan.py
      trial ─► servers start (baton.launch) ─► each load ─► servers stop        trial.py, servers.py
        cell ─► load generator (baton.bench.load) ─► figures, CPU, proof        trial.py
    cells ─► intervals, crossover ─► verdict ─► table, page        analysis.py, verdict.py, page.py

File map:
    plan.py            configurations (single, replicated, 1P1D, …), loads, trials (pure)
    servers.py         one configuration's servers; peers/: other projects'
    usage.py           CPU time of processes and machine, from /proc; energy, by RAPL and NVML
    transfer_check.py  did KV move, and where did the time go: by traces, of peers by metrics
    trial.py           one configuration with every load, cell by cell
    runner.py          all trials; results are saved after each
    results.py         the JSON, and which metrics are compared; folder.py: the folder of results
    analysis.py        cells → analysis (pure); verdict.py: analysis → sentences (pure)
    page.py            the HTML page and its tables (pure)
"""
