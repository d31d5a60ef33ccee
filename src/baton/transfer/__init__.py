"""How bytes move: pages of a local region into a peer's region, over the transport at hand.

Enters: whole page index lists (`PageWrite`), grants that admit a peer's writes. Leaves: from
`poll`, what completed, what arrived, and which closed grants are quiescent.

File map:
    interface.py    `Transport`, its requests and events, and the registry of kinds
    region.py       registered memory: allocate, view, check what a peer claims
    peer_mappings.py  peers' pages as further pages of one's own, by reference
    bounds.py       one write's bounds, checked before a byte is touched
    page_set.py     what a receiver admits
    scatter_gather.py  which bytes a part of a transfer moves, and those bytes as lists of buffers
    device_memory.py  an engine's tensors on a GPU as a region
    links/          what a link costs, and which one is the cheapest for a transfer
    transports/     the kinds: `shared` (one host's memory), `local` (one process), `tcp`, `file`,
                    `nixl`, `mooncake`, `cuda_ipc` (one host's GPUs)

    What the kinds' connections are made of (besides `baton.net`):
    messages.py     msgpack bodies, checked where they are decoded
    reactor.py      `baton.net`'s reactor with a transport's events
    grant_ledger.py  who may still store into which grant, where writers store themselves (pure)
    onesided/       what libraries that move bytes by themselves have in common
"""
