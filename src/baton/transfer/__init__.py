"""How bytes move: pages of a local region into a peer's region, over the transport at hand.

Enters: whole page index lists (`PageWrite`), grants that admit a peer's writes. Leaves: from
`poll`, what completed, what arrived, and which closed grants are quiescent.

File map:
    interface.py    `Transport`, its requests and events, and the registry of kinds
    region.py       registered memory: allocate, view, check bounds and what a peer claims
    scatter_gather.py  which bytes a part of a transfer moves, and those bytes as lists of buffers
    huge_pages.py   huge pages for regions
    streaming_copy.py  copies past the caches
    peer_mappings.py  peers' pages as further pages of one's own, by reference
    devices/        regions in a DAX device or a file
    links/          what a link costs, and which one is the cheapest for a transfer
    transports/     the kinds: `shared` (one host's memory), `local` (one process), `tcp`, `file`,
                    `nixl`, `mooncake`, `cuda_ipc` (one host's GPUs)

    What the kinds are made of (besides `baton.net`):
    messages.py     msgpack bodies, checked where they are decoded
    endpoints.py    listening sockets and their endpoints
    adaptive_wait.py  polls for a moment before its thread sleeps
    base_transport.py  regions, remotes, checked requests, connections: each kind adds what differs
    grants.py       the receiver's grants, and which peers may still write into them
    peer_writes.py  both ends of transports whose peers write the pages themselves
    grant_messages.py  the grant messages between those ends
    onesided/       what libraries that move bytes by themselves have in common
"""
