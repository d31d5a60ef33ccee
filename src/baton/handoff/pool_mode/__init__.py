"""Mode pool: KV through the store. Prefill keeps it there, decode takes it; the two never meet.

Enters: the same orders as in other modes. Leaves: the same events, though KV may land in part.

File map:
    store_access.py   what a worker takes part with, and what became of its entries
    store_handoff.py  the thread that deposits and collects
    store_writer.py   prefill's half of one handoff (pure), and what carries it out
    store_reader.py   decode's half (pure), and what carries it out
    prefix_store.py   prompts' beginnings: loaded instead of computed, and kept
    load_costs.py     what loading takes in each tier, and how much is loaded (pure)
    keep_queue.py    what engines have computed, on its way into the store
    keep_pace.py     when, and how much at once
    store_journal.py  what the store holds, and where, reported to gateways
    reported_entries.py  what was reported, in columns
    store_places.py   its tiers and servers, each with an identity
    block_copier.py   between a worker's pages and bodies of entries
    side_entries.py   small entries: that prefill's engine computes, its last word, identities
    metrics.py        what became of the entries, and the store's tiers
    store_report.py   tiers, and prompts that were found, for gateways
"""
