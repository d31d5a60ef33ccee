"""Regions that lie in a DAX device (a CXL pool, persistent memory) or in a file.

A memfd belongs to whoever maps it. A device has one size and every worker of the host maps the same
one, so each worker holds an *extent* of it, by a lock that the kernel drops when the last process
that holds it is dead. The device's first bytes are the table of extents and their owners. Peers
name an extent by its id and find where it lies in the table: a place in the device crosses no wire.

    [0, first)  the table · [first, size)  extents, each locked by its owner and whoever maps it

File map:
    table.py     whose extents are where, and where there is room (pure)
    backing.py   options; a device or file, opened and measured; byte ranges that are locked
    extents.py   an extent, mapped: allocated for a new region or attached as a peer's
    forget.py    `python -m baton.transfer.devices.forget`: initialize a device's table again
"""
