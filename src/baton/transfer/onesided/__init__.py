"""What transports have in common whose library moves bytes one-sidedly: `nixl`, `mooncake`.

The library copies between two registered memories; it knows neither grants nor keys. Here is the
rest: peers prove the cluster key over a connection of Baton's; over it the owner sends which pages
may be written and when that ends, and the writer reports what is in place. On both sides each peer
has a session (one instance of the library) of its own: closing it is what makes sure that a
transfer that cannot be cancelled moves nothing any more.

File map:
    session.py     the interface to a library: what it must be able to do
    transport.py   `OneSidedTransport`: the contract, admission, the owner's end, the poll timer
    remote.py      the initiating end
    wire.py        the messages, and their bounds
"""
