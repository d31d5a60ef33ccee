"""Placement in virtual time: the router's own code, before workers that are simulated.

Enters: sessions (prompts by runs of tokens, lengths of answers, arrival times), a fleet, policies.
Leaves: what each request's client would have seen, and where it was placed.

What runs is the product's: policies, `FleetLoad`, `ModelPrefixes` (fed with events, late as in
production), `Division`. What is simulated is one loop for each worker, as both engines have it: a
piece of the oldest prompt, then a step of all answers; and its prefix cache.

File map:
    costs.py        `SimulatedCosts`: seconds and sizes of a worker
    sessions.py     `Session`, `Turn`, `TokenRun`: what is asked
    cache.py        `SimulatedCache`: a worker's blocks, the least recently used ones leave first
    store.py        `SimulatedStore`, `StoreReporter`: what workers of one host share
    worker.py       `SimulatedWorker`: its loop
    gateway.py      `SimulatedGateway`: places requests by what it knows of the workers
    simulation.py   `Simulation`: clients, gateways, events, time
    outcomes.py     `RequestOutcome`, `summarize`: what was seen
"""
