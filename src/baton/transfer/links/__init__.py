"""What a link costs: a transport between two workers, one way, as it was measured.

Enters: times of probes and of real transfers. Leaves: for each transfer's shape, the transport that
is predicted to be the cheapest, with the alternatives. Pure: no clock, no socket, no thread; the
probes themselves are made by `handoff/probing.py`.

    seconds(shape) = latency + descriptors x cost of one + bytes / bandwidth

Push and pull are links of their own: one side writes, the other side's transport reads, and the
two may differ a hundredfold.

File map:
    shape.py     what a transfer's cost depends on
    model.py     the three numbers: predict, and refine from one more transfer
    fitting.py   the three numbers from a list of probes, outliers or not
    default_cost.py  the three numbers of links without a measurement
    comparison.py  what several would take, some of which are known better than others
    choice.py    the cheapest of several, without flip-flop
    backoff.py   how long one that failed is left alone
    probe_buffer.py  the memory that probes use, and the bytes in it
    probes.py    which probes are made, within which bounds
    outcome.py   what is recorded of choices and transfers
"""
