"""Where KV is kept: entries by content, in tiers of bounded size, shared by the workers of a host.

Enters: block hashes, and KV in canonical order. Leaves: leases of entries, whose bytes are what was
put there or are reported missing (never wrong). No daemon: the tiers are folders of files.

File map:
    interface.py  `Tier`, `EntryLease`: the contract, and the registry of kinds
    entry_format.py       what an entry holds, and how it is named
    record.py     an entry as it rests in a file
    capacity.py       how full a tier is, which entries go first (pure)
    folder/       a folder of entries, crash-safe, shared by processes
    tiers/        the kinds: `shared` (this host's memory), `file`
    tiered.py     several tiers as one: handing down, copying up
    counted_tier.py   what was asked of a tier, counted around it
    metrics.py    those counts for Prometheus
"""
