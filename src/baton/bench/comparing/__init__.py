"""`baton bench compare`: is B better than A, or was it the weather? Pure but for files.

Enters: reports of `baton bench serve`, one or several runs a side. Leaves: for each metric a
ratio, its interval, a p-value and a verdict in words; before that, what was not the same.

File map:
    statistics.py    samples in clusters: bootstrap of ratios, rank and permutation tests (numpy)
    metrics.py       reports → samples of each metric
    verdict.py       numbers → words
    differences.py   two manifests → what differs
    comparing.py     two sides → a comparison; reading.py: files → sides; printing.py
"""
