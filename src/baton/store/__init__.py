"""Stores KV: entries by content hash, in tiers of bounded size that workers share.

Enters: block hashes, and KV in canonical order. Leaves: leases of entries, whose bytes are what was
put there or are reported missing (never wrong). No daemon of its own: tiers
are folders of files, servers that are there already, or a process's own memory.

File map:
    interface.py  `Tier`, `EntryLease`: the contract, and the registry of kinds
    entry_format.py       an entry's bytes and its name
    capacity.py       how full a tier is (pure)
    eviction.py       which entries go first: the contract, and the registry of policies (pure)
    victims.py        entries that were chosen to go, and wait (pure)
    evictions/        the policies: `lru`, `s3fifo` (pure)
    request_threads.py   threads that carry out requests and system calls
    folder/       a folder of entries, crash-safe, shared by processes
    remote/       a tier on a server: bounded waits, back-off, read-ahead, write-behind
    tiers/        the kinds: `host`, `shared` (this host's memory), `file`, `redis`, `object`
    compression.py    bodies in fewer bytes, and whether that pays (pure)
    compressed_lease.py   leases of such bodies
    memory_lease.py   a lease of bytes of this process
    tiered.py     several tiers as one: demotion, copying up
    promotion.py      which entries are copied up when they are read (pure)
    puts.py           several puts one after the other, and one as several
    counted_tier.py   counters around a tier, for Prometheus
"""
