"""What a link costs: a transport between two workers, one way, as it was measured.

Enters: times of probes and of real transfers. Leaves: for each transfer's shape, the transport that
is predicted to be the cheapest, with the alternatives. Pure: no clock, no socket, no thread; the
probes themselves are made by `handoff/probing.py`.

    seconds(shape) = latency + descriptors x cost of one + bytes / bandwidth

Push and pull are links of their own: one side writes, the other side's transport reads, and the
two may differ a hundredfold.

File map:
    cost_model.py  a transfer's shape, and the three numbers: defaults, fit, predict, update
    choice.py      the cheapest of several links, without flip-flop; backoff; the record of both
    probes.py      which probes are made, within which bounds, and the memory they use
"""
