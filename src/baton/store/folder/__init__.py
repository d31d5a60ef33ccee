"""Folders of entries, shared by the processes of one user without a daemon.

File map:
    opening.py      a folder that is this user's alone, and who works in it
    unnamed_file.py   files that appear whole or not at all
    shared_capacity.py  how full it is, as all its users know it
    lease.py        an entry that is being read
    tier.py         `FolderTier`: the contract
"""
