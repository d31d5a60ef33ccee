"""One request's KV, from the prefill worker to the decode worker.

Enters: orders from the two engines (`start_receive` on decode, `start_send` on prefill) and the
layers as they are computed. Leaves: `KVLanded` with every page verified, or `KVFailed` and, once
nothing can land any more, `BlocksQuiescent`. The protocol is drawn in `session/`, its bytes in
`docs/wire/handoff.md`.

File map:
    interface.py        what an engine sees: orders, events, `HandoffPort`
    read_prefixes.py    prompts' beginnings that are read before blocks are reserved for them
    dispatcher.py       what an engine holds: each order goes to whoever carries out its mode
    agent.py            a `HandoffPort`: queues what the engine orders, and its thread
    agent_loop.py       what that thread owns: links, transports, sessions; dispatches their events
    options.py          what an agent is built from; lease_file.py: a write lease of a whole host
    prefill_sender.py   the prefill worker's handoffs: carries out what `SendSession` asks for
    awaited_stamps.py   when a GPU got to what it was given to do, for traces
    decode_receiver.py  the decode worker's handoffs: carries out what `ReceiveSession` asks for
    session/            the two state machines of one handoff, pure
    write_batches.py    one handoff out of this worker: page copies, digests, writes
    incoming.py         one handoff into this worker: its peer, pages, write grants, digests
    page_reads.py       reads of peers' pages: posted, verified, made again elsewhere
    verify.py           how much of what arrives is compared with its sender's digests
    kv_views.py         how a worker shows its KV to peers, and the pages that one handoff has;
                        staging pages: who holds them, who waits
    encoded_view.py     a view whose pages are encoded
    encoding_choice.py  which encoding a handoff gets, by measured rates (pure)
    link_encodings.py   the same for each handoff: chosen by decode, which grants its pages
    block_guard.py      blocks in an order to the store, until the engine takes them back
    token_ranges.py     token ranges of layers: landed, missing, counted
    messages.py         messages between two agents, decoded and bounds-checked at the seam
    link.py             one authenticated control connection between two agents
    peers.py            linked peers, their Hello messages, what both can do, and their liveness
    grants.py           grants and leases: checked, renewed, remembered once they ended
    heartbeat.py        that this worker's engine computes, and what is to come: sent to peers
    peer_transports.py  the transports that reach a peer: attached, chosen from, cooled down
    segment_reports.py  what the kernel sent over the transports' connections, by peer
    probing.py          measures links, while no handoff waits; scratch memory for peers' probes
    link_page.py        a worker's page of what its links cost
    io_backend.py       what an agent has of its machine: sockets, a selector, a bell
    reference/          mode reference: blocks that one worker exports and another attends over
    pool_mode/          mode pool: through the store
"""
