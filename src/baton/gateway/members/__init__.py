"""Where a gateway learns which workers there are, while it runs.

Enters: sets of addresses from sources (`gateway.members`). Leaves: workers that are probed, placed
on, drained and forgotten (`baton.gateway.workers`).

File map:
    interface.py    the contract of a source, and what every source gets
    file.py, dns.py the sources `file` and `dns`
    kubernetes.py, kubernetes_api.py, endpoint_slices.py
                    the source `kubernetes`; its requests; what they answer (pure)
    member_set.py   which workers all sources together list, and by which rule (pure)
    membership.py   follows the sources; forgets workers that have left
    announced.py, lease_table.py, heartbeat_table.py
                    the source `announced`: leases of workers' names, their heartbeats (both pure)
    listener.py, heartbeat_socket.py, gossip.py
                    where announcements and heartbeats arrive; exchanges between gateways
    heartbeat_receiver.py  takes heartbeats and renewals, acknowledges renewals
    metrics.py, announced_metrics.py
                    what is known of each source, and of announcements, as Prometheus reads it
"""
