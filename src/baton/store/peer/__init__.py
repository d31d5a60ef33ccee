"""Tier `host` read, and written, by other processes over authenticated connections.

Enters: names of entries. Leaves: values (header and body, as in a folder's files), which the reader
believes only with the cluster's tag.

File map:
    addresses.py  where tiers listen, as operators write it
    wire.py     messages of a connection, and their bounds
    server.py   `EntryServer`: a thread that answers peers from this process's `host` tier
    client.py   `PeerClient`: one such server, as `RemoteTier` asks it
    owners.py   which of several peers keeps an entry (pure)
    tier.py     `PeersTier`: several servers, asked at once
"""
