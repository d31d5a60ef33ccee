"""Tiers on a server that other hosts reach too: values by key, over a network that may fail.

File map:
    client.py           `RemoteClient`: what a server's library has to offer; its errors
    tier.py             `RemoteTier`: the contract of a tier on top of one client
    lease.py            a lease of a value that was received
    circuit_breaker.py  when a server that failed is asked again (pure)
    refused_reads.py    entries that the server refused lately, and gives others
    read_ahead.py       fetches the entries that are asked for next
    write_behind.py     entries that upper tiers demote, on their way to the server
"""
