"""Public test kits: for Baton's own tests, and for whoever writes an implementation of a contract.

Enters: an implementation. Leaves: a verdict, or a fault made on purpose. Nothing that ships imports
this package; it needs pytest.

File map:
    transport_contract/    `TransportContract`: what every transport must do
    transport_pair.py      two transports, their regions, and how to drive both
    transport_peer.py      a writer, or an owner, in a second process, to be stopped and killed
    network_namespaces.py  other hosts: on a cable that is cut, on a switch that loses packets
    faulty_transport.py    `FaultyTransport`: any transport, with counted, seeded faults
    corrupted_copies.py    how bytes go wrong under it
    store_contract.py      `TierContract`, `StoreContract`: what tiers of the store must do
    store_faults.py        `FolderFaultContract`: tiers of files; killed writers, flipped bits
    store_syscalls.py      system calls of such a tier that fail, or end its process, in turn
    store_writer.py        a writer of a tier in a second process, to be killed
    fleet.py               `Fleet`: real workers and gateways, for end-to-end tests and benchmarks
    clocks.py              `ManualClock`: a clock that tests advance
"""
