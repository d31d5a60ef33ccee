"""Wire schemas that several packages share, declared once.

Enters and leaves: nothing; there is no I/O here. A schema is a frozen `msgspec.Struct`; its bounds
are checked where it is decoded.

File map:
    request_fields.py   OpenAI's two request bodies, as Baton's own engines answer them
    engine_fields.py    fields that only some engines serve, and values that change nothing
    prompt_bounds.py    bounds on a prompt that cost no more than a look at its JSON (pure)
    worker_http.py      HTTP between a gateway and its workers: paths, headers, bodies
                        (docs/wire/worker-http.md, tested against it)

Which workers there are:
    members.py          the members file, which a launcher writes
    announcements.py    how workers announce themselves, and what gateways send each other
    heartbeats.py       datagrams between a worker and each gateway

A gateway's pages:
    gateway_http.py     their paths
    management.py       how programs show the key in front of them
    request_traces.py   `/debug/requests`
    route_explanation.py  `/debug/route`
    demand.py           `/debug/demand`, which an autoscaler reads
    alerts.py           `/alerts`
"""
