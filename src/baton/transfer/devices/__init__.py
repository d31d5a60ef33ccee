"""Regions that lie in a DAX device (a CXL pool, persistent memory) or in a file.

A memfd belongs to whoever maps it. A device has one size and every worker of the host maps the same
one, so each worker holds an *extent* of it, by a lock that the kernel drops when the last process
that holds it is dead. The device's first bytes are a table that says whose the extents are. Peers
name an extent by its id and find where it lies in the table: a place in the device crosses no wire.

    [0, first)  the table · [first, size)  extents, each locked by its owner and whoever maps it

File map:
    options.py   the options; how engines get their memory from it
    backing.py   a device or file, opened: its size, its alignment, what it can not be
    locks.py     byte ranges of a file that no other process holds
    table.py     whose extents are where, and where there is room (pure)
    extents.py   an extent as a mapping, held for as long as that lives
    claiming.py  a new region's extent · attaching.py a peer's
    flushing.py  how ranges leave this processor's caches · coherence.py which, and when
    forget.py    `python -m baton.transfer.devices.forget`: begin a device's table anew
"""
