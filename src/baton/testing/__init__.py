"""Public test kits: for Baton's own tests, and for whoever writes an implementation of a contract.

Enters: an implementation. Leaves: a verdict, or a fault made on purpose. Nothing that ships imports
this package; it needs pytest.

File map:
    clocks.py              `ManualClock`: a clock that tests advance
    fleet.py               `Fleet`: real workers and gateways, for end-to-end tests and benchmarks
    faulty_transport.py    `FaultyTransport`: any transport, with counted, seeded faults
    corrupted_copies.py    how bytes go wrong under it
    transport_contract/    `TransportContract`: what every transport must do
    transport_peer.py      a writer, or an owner, in a second process, to be stopped and killed
    transport_pair.py      two transports, their regions, and how to drive both
"""
