"""Other projects' servers: the same model on the same workers.

Enters: a configuration and how Baton's own workers of it would start. Leaves: servers behind one
URL, pinned to the same cores, and their own metrics of KV that moved.

File map:
    plan.py        which processes, with which arguments (pure); whether a peer is installed
    servers.py     all servers of a configuration: start, pin, stop
    proxy.py       a process: prefill first, then decode, as vLLM's connectors need it
"""
