"""Folders of entries, shared by the processes of one user without a daemon.

File map:
    directory.py        a private folder: locks, and files that appear whole or not at all
    shared_capacity.py  its usage, counted by all processes
    tier.py             `FolderTier` and leases of its entries
"""
