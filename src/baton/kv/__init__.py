"""What a block is: its name, its shape, its state, and how it is copied between two shapes.

Enters: token ids, a worker's layout and its peer's, block tables. Leaves: block hashes, page
copies for a transport, digests for a receiver, and the pool that records who holds which block.
Pure: no I/O, no clock, no threads, no torch.

File map:
    layout.py     `KVLayout`: layers, heads, block size, order, shard; sizes; the window; what two
                  layouts may differ in
    identity.py   `BlockHash`, `HashDomain`, the prompt hash
    geometry.py   where a page's bytes are; the spans and heads that two pages share
    copies.py     `BlockTable`, pieces, `PageCopies`: what one write moves; a plain executor;
                  what a handoff's layers have in common, computed once
    runs.py       adjacent pieces merged into runs
    token_slices.py  where some tokens are in pages of two sequences, as few slices
    prefix_names.py  names of prefixes that need no state but the name before: what gateways use
    canonical.py  KV of a token range in canonical order, gathered and scattered
    digest.py     a digest for each piece, equal on both sides
    device_digest.py  the same where the host cannot read the pages: sum128
    digest_table.py, row_order.py  many digests in few bytes, and the order of their last use
    blocks.py     `BlockState`, the ledger; reserved → in flight → quiescent, quarantined
    pool.py       `BlockPool`: references, prefix cache, eviction
"""
