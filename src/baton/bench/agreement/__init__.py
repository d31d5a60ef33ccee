"""`baton bench compare` of two architecture benchmarks: do they say the same?

Enters: two results of `baton bench architectures`. Leaves: for each arm, load and metric whether
their stated intervals meet, and how many of how many do; before that, what was not the same.

File map:
    reading.py    a folder or its results.json → findings
    agreeing.py   two findings → what agrees (pure)
    printing.py   the terminal's table
"""
