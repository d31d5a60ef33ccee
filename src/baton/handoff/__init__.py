"""One request's KV, from the prefill worker to the decode worker.

Enters: orders from the two engines (`start_receive` on decode, `start_send` on prefill) and the
layers as they are computed. Leaves: `KVLanded` with every page verified, or `KVFailed` and, once
nothing can land any more, `BlocksQuiescent`. The protocol is drawn in `session/`, its bytes in
`docs/wire/handoff.md`.

File map:
    interface.py             what an engine sees: orders, events, `HandoffPort`
    kv_views.py              the ways in which a worker shows its KV to peers
    messages.py              messages between two agents, decoded and bounds-checked at the seam
    negotiation.py           whether two workers can exchange KV, through which views, and why not
    token_ranges.py          token ranges of layers: intersect, subtract, pack
    coverage.py              counting what landed against what is expected
    session/                 the two state machines of one handoff, pure
    staging.py               staging pages: who holds them, who waits
    mapped_pages.py          the pages of a KV view that one handoff has
    write_batches.py         from a token range to page copies, digests and a notification, and back
    io_backend.py            what an agent has of its machine: sockets, a selector, a bell
    link.py                  one authenticated control connection between two agents
    peer_transport_table.py  the transports that reach a peer: attached, chosen from, cooled down
    peer_transport.py        one of them: how it stands, what it costs, what it carries
    link_options.py          how one is chosen
    link_prober.py           measures links by probes, while no handoff waits
    probe_target.py          this worker's scratch memory, where peers' probes land
    transport_usage.py       what carried one handoff, and what should have
    peers.py                 linked peers, their Hello messages, and their liveness
    decode_receiver.py       the decode worker's handoffs: carries out what `ReceiveSession` asks
                             for
    incoming.py              one of them: its peer, pages and windows
    page_reader.py           reads of a peer's pages
    outgoing.py              one of the prefill worker's handoffs: what was granted, what carries it
    prefill_sender.py        the prefill worker's handoffs: carries out what `SendSession` asks for
    block_exporter.py        blocks that peers attend over, and what proves that they stopped
    block_importer.py        peers' blocks that this worker's engine attends over
    grants.py                grants: checked, and kept until their request is here
    layer_writes.py          how a layer's range leaves: as writes, or as announcements
    context.py               what both work with
    heartbeat.py             this worker's engine heartbeat: that it computes, and what is
                             to come
    heartbeat_publisher.py   sends it to decode workers, so that they wait for a queue
    tombstones.py            tickets that ended before this side received a message about them
    agent.py                 the thread that owns links, transports and sessions; implements
                             `HandoffPort`
"""
