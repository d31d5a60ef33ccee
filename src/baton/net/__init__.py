"""One authenticated, framed socket stack for transports, links and doctor; one HTTP server.

Enters: sockets, the cluster key, frames' bodies and lists of buffers. Leaves: frames and page bytes
of peers that have proved the key, and an error, once, where a connection ends.

File map:
    framing.py     frames on a byte stream, the messages in them, and the handshake (sans-I/O)
    channel.py     a non-blocking socket that carries frames and page bytes; its read-ahead
    connection.py  the reactor: readiness, timers, queued events; a channel inside it, which fails
                   once; whether its peer makes progress
    endpoints.py   dial and accept peers, until they have proved the key; a peer's process
    tls.py         TLS beneath the frames
    credentials.py finds what this process proves itself with, as it is configured
    cluster_client.py    small HTTP requests to one process of the cluster
    kubernetes/    requests to a Kubernetes API server
    http_server.py an HTTP server: its socket, uvicorn's settings; http_limits.py: what clients may
                   hold of it; http_protocol.py: a connection; http_exchange.py: request, response
    turn_writes.py the writes of one turn of the event loop, at its end
    multiplex.py   parts of many streams over one connection; multiplex_server.py: a worker's end
    probes.py      Kubernetes' probes of a worker, on a port of its own
    host_names.py  addresses of host names; daemon_thread.py: calls that may hang
    parent_process.py    who exits with it, and whether this process does
    preemption.py  whether this machine will be taken: a file, or metadata_services.py of clouds
"""
