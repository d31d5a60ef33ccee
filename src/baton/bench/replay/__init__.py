"""Traffic, recorded or generated, replayed in virtual time under several policies.

Enters: a `Workload`, a fleet by its roles, policies, costs of simulated workers.
Leaves: a `ReplayReport`, for each policy what clients would have seen. What runs is `sim/router/`.

File map:
    plan.py         `ReplayPlan`, `Roles`: what is replayed, and how it arrives
    costs.py        costs of workers: from a file, or as a gateway has learned them
    sessions.py     a workload → sessions of a simulation
    runner.py       `run_replay`: one simulation for each policy
    printing.py     the table
"""
