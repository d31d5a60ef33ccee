"""How bytes move: pages of a local region into a peer's region, over the transport at hand.

Enters: whole page index lists (`PageWrite`), windows that admit a peer's writes. Leaves: from
`poll`, what completed, what arrived, and which closed windows are quiescent.

File map:
    interface.py    `Transport`, its requests and events, and the registry of kinds
    region.py       registered memory: allocate, view, check what a peer claims
    bounds.py       one write's bounds, checked before a byte is touched
    windows.py      what a receiver admits
    links/          what a link costs, and which one is the cheapest for a transfer
    transports/     the kinds: `shared` (one host's memory), `tcp`

    What the kinds' connections are made of:
    framing.py      bodies on a byte stream (sans-I/O)
    handshake.py    mutual proof of the cluster key (sans-I/O)
    messages.py     msgpack bodies, checked where they are decoded
    channel.py      a non-blocking socket that carries frames and page bytes
    connection.py   a channel under watch, which fails once
    dialing.py      connect and prove
    listening.py    accept, bounded, and prove
    reactor.py      readiness, timers, and the events that are owed
"""
