"""One machine, one command: starts workers and a gateway, watches them, stops them.

Enters: a resolved configuration. Leaves: one running gateway with its workers, each a process of
its own (`python -m baton.cli …`) that speaks to the launcher only by status_messages on an
inherited pipe, signals and its exit code. Nothing survives the launcher, however it ends.

File map:
    plan.py        which processes, with which arguments (pure); how the machine's cores are shared
                   between workers (pure)
    child.py       one process: spawn, status_messages, log lines, exit; when a process that died
                   may start again (pure); what an exit code and last log lines probably mean
                   (pure)
    ports.py       is the gateway's port free, and who holds it
    progress.py    what the person at the terminal sees; does the gateway see all workers
    supervisor.py  starts all, keeps all running, drains all; one position: its process now, and
                   how the next one starts
    fleet.py       what an operator may ask of a running fleet, wherever it runs (contract)
    errors.py      `FleetError`
    ray/           a fleet on several hosts, which Ray places
"""
