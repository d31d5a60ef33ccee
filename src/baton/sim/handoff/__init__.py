"""The handoff protocol, simulated: a whole cluster in one process, with a virtual clock and a seed.

Enters: a seed. Leaves: an `Outcome`, and the invariant that broke, if one did. What runs is the
production code: agent, sender and receiver, sessions, links and their bytes, routes, staging,
tickets, engine loop, scheduler and block pool. Simulated are the network under the links, the
transports, the model, and the gateway. docs/reliability.md describes how to use it.

File map:
    plan.py              what a schedule is: workers, clients, faults
    generating.py        from a seed to a schedule; schedules in which blocks are exported, or kept
                         in the store
    timeline.py          virtual time, its order, the log, and skewed clocks
    network.py           connections between hosts, and what breaks them
    transport.py         transports that keep their contract, and nothing more
    fabric.py            what carries their bytes; what befalls them on the way
    store.py             the store
    pool_mode.py         the store handoff, without its thread
    memory.py            KV that names its request and incarnation; a model that computes such KV
    agent.py             the production agent, watched
    process.py           one life of a worker, around the production engine loop; the end of an
                         incarnation, as its kernel reports it
    gateway.py           who places, asks, aborts and tries again; the gateway's requests to
                         workers
    world.py             one run's cluster
    fault_injector.py    carries out faults
    internals.py         the books of the production code, for the checker alone
    allowed_failures.py  how requests may end, and why; an invariant that does not hold
    checker.py           the invariants at each step; what is held under a lease, and for how long;
                         what goes through the store; what peers attend over, and until when
    campaign.py          many seeds, in several processes; one run; a shorter schedule that fails
                         the same way
"""
