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
    kubernetes/    requests to a Kubernetes API server
    http_server.py an HTTP server: its socket, uvicorn's settings; http_limits.py: what clients may
                   hold of it; http_protocol.py: a connection; http_exchange.py: request, response
    preemption.py  whether this machine will be taken: a file, or metadata_services.py of clouds
"""
