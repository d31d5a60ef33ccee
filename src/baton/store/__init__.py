"""Stores KV: entries by content hash, in tiers of bounded size, shared by the workers of a host.

Enters: block hashes, and KV in canonical order. Leaves: leases of entries, whose bytes are what was
put there or are reported missing (never wrong). No daemon: the tiers are folders of files.

File map:
    interface.py  `Tier`, `EntryLease`: the contract, and the registry of kinds
    entry_format.py       an entry's bytes and its name
    capacity.py       how full a tier is (pure)
    eviction.py       which entries go first: the contract, and the registry of policies (pure)
    evictions/        the policies: `lru`, `s3fifo` (pure)
    folder/       a folder of entries, crash-safe, shared by processes
    tiers/        the kinds: `shared` (this host's memory), `file`
    tiered.py     several tiers as one: demotion, copying up
    counted_tier.py   counters around a tier, for Prometheus
"""
