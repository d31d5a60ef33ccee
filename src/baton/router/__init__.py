"""Which workers serve a request. Pure: no I/O, no clock, no randomness.

Enters: a `Fleet` (what the registry of workers knows at this moment), a `PlacementRequest`, and a
`FleetLoad` (what the gateway has given its workers to do, and how fast they do it).
Leaves: a `Placement` (prefill worker or none, decode worker, mode, reasons), or `Unplaceable`.

File map:
    fleet.py        `WorkerView`, `Fleet`: an immutable snapshot, indexed by served model
    load.py         `FleetLoad`, `RunningRequest`: the requests under way;
                    worker_activity.py: what one worker has to do, and how fast it does it
    learning.py     `LearnedLine`: seconds for a size, learned from what was seen
    topology.py     `Distance`: how far apart two workers are, by the paths that they report
    handoff_costs.py      what handoffs cost, by distance: learned, measured or a default
    placement.py    `PlacementRequest`, `Placement`, `Unplaceable`: the question, the two answers;
                    `NonDisaggregableField`: the requests that one worker serves whole
    modes.py        `choose_mode`: how the KV gets from one to the other, and why
    pairing.py      `PairingPolicy`: a decode worker, then a prefill worker for it
    simple.py       `RoundRobin`, `LeastLoaded`, `RandomChoice`
    prefix.py       `PrefixPolicy`: to where a prompt's beginning is cached
    cost.py         `CostPolicy`: one worker or two, by what the client will see
                    cost_parts.py: what each worker adds to a cost; pair_search.py: likely pairs;
                    devices.py: workers that share a GPU or a core
    division.py     `Division`: how many workers only prefill at present; demand.py: predictions;
                    division_memory.py: what is known of which load;
                    arrivals.py: whether requests come independently of the answers
    prefixes.py     `ModelPrefixes`: who has, and can load from a store, how much of a prompt;
                    worker_prefixes.py: what one worker reports; prefix_index.py,
                    stored_entries.py: the indexes of caches and of tiers
    room.py         `FleetRoom`: how many more requests the workers can use
    admission.py    `AdmissionQueue`: those that wait for that, and who is refused early;
                    fair_queue.py: whose turn it is; drain_rate.py: how fast they are taken
    split_prompts.py      a long prompt that two workers compute at the same time
    rebalance.py    `Rebalancer`: which running streams move, and where to
    demand_report.py      what a gateway reports of a model's traffic; scaling.py: how many workers
                    of each role that needs
    explanation.py  `explain`: every candidate of a policy, and what it compares
    failover.py     what to do when a worker fails
    health.py       `WorkerHealth`: who is ejected, gets a trial request, or a growing share
"""
