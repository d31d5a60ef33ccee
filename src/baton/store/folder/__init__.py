"""Folders of entries, shared by the processes of one user without a daemon.

File map:
    directory.py        a private folder: locks, and files that appear whole or not at all
    shared_capacity.py  its usage, counted by all processes
    body_pool.py        memory for bodies that every process maps once
    direct_files.py     large files past the page cache
    direct_bodies.py    bodies in such files
    spare_files.py      files of removed entries that are written again
    bodies.py           where a body lies: in its entry's file, or in the pool
    entry_writer.py     keeps new entries, some at a time
    demotion.py         puts victims into the tier below, some at once
    leases.py           leases of entries
    reservations.py     what each of them is about to write
    entry_times.py      what eviction must know of an entry, in its file's times
    listing.py          lists the entries
    tenant_counts.py    how much each tenant holds
    evicted_names.py    names that were evicted lately
    known_names.py      names that this process has found, and that were not removed since
    unreadable_entries.py   entries that the disk refused to read lately
    entry_files.py      files of entries: looked at, opened, listed and marked
    entries.py          the entries: found, opened, removed and counted
    evictor.py          makes entries go
    tier.py             `FolderTier`
    compressing_tier.py    the same where bodies may be compressed
"""
