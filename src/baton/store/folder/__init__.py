"""Folders of entries, shared by the processes of one user without a daemon.

File map:
    opening.py      a folder that is this user's alone, and who works in it
    publishing.py   files that appear whole or not at all
    shared_room.py  how full it is, as all its users know it
    lease.py        an entry that is being read
    tier.py         `FolderTier`: the contract
"""
