"""Which workers serve a request. Pure: no I/O, no clock, no randomness.

Enters: a `Fleet` (what the registry of workers knows at this moment) and a `PlacementRequest`.
Leaves: a `Placement` (prefill worker or none, decode worker, mode, reasons), or `Unplaceable`.

File map:
    fleet.py        `WorkerView`, `Fleet`: an immutable snapshot, indexed by served model
    placement.py    `PlacementRequest`, `Placement`, `Unplaceable`: the question, the two answers;
                    `NonDisaggregableField`: the requests that one worker serves whole
    modes.py        `choose_mode`: how the KV gets from one to the other, and why
    round_robin.py  `RoundRobin`: workers take turns
"""
