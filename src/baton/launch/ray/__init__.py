"""A fleet on a Ray cluster: Ray places its processes and starts them elsewhere when a host dies.

Ray is the control plane alone: no request and no KV goes through it. Each process of the fleet, a
gateway or a worker, has a detached, named actor, its *supervisor*, which starts `baton gateway` or
`baton worker` as a child on its host, starts it again when it ends, and drains it. The supervisor
of a gateway asks those of all workers for their addresses, and writes them into the file that its
gateway watches (`gateway.members`). What supervisors send to each other and to operators is JSON.

File map:
    plan.py            which processes, their settings, where Ray may place them (pure)
    hosts.py           where Ray's hosts are, and which labels bind a process to one (pure)
    process.py         one process: restarts, drain, its last lines
    known_workers.py   what a gateway's supervisor knows of the workers (pure)
    members_file.py    asks the workers' supervisors, writes the gateway's file
    hosted_process.py  one process of a fleet on its host: cluster key, settings file, topology
    supervisor.py      the actor around it
    actors.py          calls of a fleet's supervisors, each with a deadline; locks of its roles
    connection.py      whether this Ray may be used, and the connection to it
    start.py           starts a fleet, and waits until it serves
    fleet.py           what an operator may ask of a running fleet: status, scale, drain, …
"""
