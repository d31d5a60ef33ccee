"""One request's KV, from the prefill worker to the decode worker.

Enters: orders from the two engines (`expect` on decode, `offer` on prefill) and the layers as they
are computed. Leaves: `KVLanded` with every page verified, or `KVFailed` and, once nothing can land
any more, `BlocksQuiescent`. The protocol is drawn in `session/`, its bytes in
`docs/wire/handoff.md`.

File map:
    interface.py  what an engine sees: orders, events, `HandoffPort`
    messages.py   what two agents say to each other, decoded and bounded at the seam
    coverage.py   counting what landed against what is expected
    session/      the two state machines of one handoff, pure
    parcels.py    from a token range to page copies, digests and a notice, and back
    link.py       one authenticated control connection between two agents
    routes.py     which transport reaches a peer: preference, attaching, what was used
    peers.py      who is linked, what they said in their Hello, whether they live
    receiving.py  the decode worker's handoffs: carries out what `ReceiveSession` asks for
    sending.py    the prefill worker's handoffs: carries out what `SendSession` asks for
    desk.py       what both work with
    graves.py     tickets that ended before this side had heard of them
    agent.py      the thread that owns links, transports and sessions; implements `HandoffPort`
"""
