"""A rig for moving bytes between two processes: start them, verify what arrives, measure it.

Enters: a backend's name and options, and where its two processes run. Leaves: digests that were
compared, and the wall time of every transfer with the CPU time of both processes.

    runner (this process)  ──commands──►  driver  starts and times every transfer   pool A
                           ──commands──►  owner   serves what transfers need         pool B

`python -m baton.rig.node` is the process that knows the registered transports. A caller with other
backends runs a module of its own that calls `run_node` with its own builder.

File map:
    pages.py    what is moved: messages or scattered pages; pools of random bytes, digests
    backend.py  the interface to whatever moves bytes; transport.py: registered transports;
                commands and replies; channel.py: framed messages over a socket, authenticated
    nodes.py    where a pair's processes come from: child processes, which are killed with their
                parent, or remote hosts
    node.py     the measured process; one core, a network namespace; machine.py: host, versions
    pair.py     two processes and one backend: connect, verify, measure
"""
