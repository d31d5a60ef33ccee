"""Wire schemas that several packages share, declared once.

Enters and leaves: nothing; there is no I/O here. A schema is a frozen `msgspec.Struct`; its bounds
are checked where it is decoded.

File map:
    request_traces.py   a gateway's answers to /debug/requests
    worker_http.py      HTTP between a gateway and its workers: paths, headers, bodies
                        (docs/wire/worker-http.md, tested against it)
"""
