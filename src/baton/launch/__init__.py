"""One machine, one command: starts workers and a gateway, watches, changes and stops them.

Enters: a resolved configuration, and an operator's requests. Leaves: a running fleet, each process
of its own (`python -m baton.cli …`). They speak to the launcher only by status_messages on an
inherited pipe, signals and exit codes. Nothing survives the launcher, however it ends.

File map:
    plan.py         which processes, with which arguments; how cores are shared (pure)
    child.py        one process: spawn, status_messages, log lines, exit and its probable cause
    slots.py        one position: its process now, how the next one starts
    restarter.py    keeps its process running; restarts.py: when the next one starts (pure)
    sockets.py      the gateway's listening sockets, which outlive its processes
    ports.py        is a port free, and who holds it
    supervisor.py   starts all, keeps all running, drains all
    operations.py   changes a launch that serves: scale, drain, upgrade
    members_file.py lists the workers for the gateways
    gateways.py     what gateways report of workers
    resources.py    is there room for a second process like one that runs
    folder.py       a fleet's state folder, and the lock that makes its name unique
    logs.py         log files of bounded size
    progress.py     what the person at the terminal sees
    fleet.py        what an operator may ask of a fleet, on whatever backend (contract)
    autoscaler.py   has the fleet resized by what gateways are asked for
    role_changes.py carries that out: one change of each role at a time
    control.py      the launcher's end of the control socket
    control_messages.py   what is sent over it
    local.py        the operator's end: a `FleetControl` of a fleet on this machine
    errors.py       the error of a fleet that refuses, or is not there
    ray/            a fleet on several hosts, which Ray places
    kubernetes/     a release of the Helm chart, which Kubernetes runs
"""
