"""The doctor: from one host, or one running fleet, to findings a person can act on.

Enters: a host (its /proc and /sys, its programs, its Python packages) or a gateway's URL. Leaves:
a `Report` of findings, each with a level, what was found, why it matters, and at most one command
that fixes it. Each probe runs in a process of its own: one that crashes is itself a finding, one
that hangs is cut. Nothing on the host is changed, nothing needs root, and nothing listens outside
loopback except what a transport's own library opens, which is reported.

File map:
    finding.py          `Finding`, `Report`, levels, exit codes; `Probe`, and how numbers are
                        written
    host.py             where probes look; tests give them recorded trees of other machines
    isolation.py        runs probes in processes of their own, all at once, bounded
    reporting.py        which probes there are; host → report, gateway → report; a report for a
                        terminal
    machine.py          kernel, processors, NUMA, container
    memory.py           memory, cgroup limits, /dev/shm, huge pages, overcommit; open files, locked
                        memory
    kernel_checks.py    memfd and seals, huge pages, proof of death, reading another process's
                        memory: tried
    devices.py          GPUs, RDMA, DAX
    network.py          network interfaces, socket buffers
    versions.py         Python and the packages that engines and transports are made of
    transports.py       each installed transport: does it work here, and if not, why
    store.py            the store's tiers that are on servers: reachable, and bounded?
    transport_check.py  one transport, tried between two processes of `baton.rig`
    fleet.py            a running gateway's pages
    alerts.py           its alerts
"""
