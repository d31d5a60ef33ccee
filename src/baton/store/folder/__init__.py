"""Folders of entries, shared by the processes of one user without a daemon.

File map:
    directory.py        a private folder: locks, and files that appear whole or not at all
    shared_capacity.py  its usage, counted by all processes
    reservations.py     what each of them is about to write
    entry_times.py      what eviction must know of an entry, in its file's times
    evicted_names.py    names that were evicted lately
    tier.py             `FolderTier`
    lease.py            leases of its entries
"""
