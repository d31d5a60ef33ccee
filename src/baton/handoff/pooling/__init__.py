"""Mode pool: KV through the store. Prefill keeps it there, decode takes it; the two never meet.

Enters: the same orders as in other modes. Leaves: the same events, though KV may land in part.

File map:
    pool.py        what a worker takes part with
    pieces.py      a prompt as the store keeps it (pure)
    deposit.py     prefill's half of one handoff (pure)
    collection.py  decode's half (pure)
    note.py        the prefill worker's last word, kept in the store, too
    signs.py       that its engine computes, kept there as well; words.py reads both
    carrying.py    between a worker's pages and bodies of entries
    keeping.py     carries out deposits; taking.py carries out collections
    desk.py        the thread that does both; absent.py a worker without a store
    tally.py       what became of the entries; metrics.py shows it, and the store's tiers
"""
