"""Mode pool: KV through the store. Prefill keeps it there, decode takes it; the two never meet.

Enters: the same orders as in other modes. Leaves: the same events, though KV may land in part.

File map:
    store_access.py        what a worker takes part with
    token_segments.py      a prompt as the store keeps it (pure)
    store_write.py     prefill's half of one handoff (pure)
    store_read.py  decode's half (pure)
    completion_marker.py        the prefill worker's last word, kept in the store, too
    heartbeat_entry.py       that its engine computes, kept there as well; side_entry.py reads both
    block_copier.py    between a worker's pages and bodies of entries
    store_writer.py     carries out deposits; store_reader.py carries out collections
    store_handoff.py        the thread that does both; no_store.py a worker without a store
    entry_counts.py       what became of the entries; metrics.py shows it, and the store's tiers
"""
