"""What every transport must do. Inherit `TransportContract` in a test module to run all of it.

Enters: a transport's kind, or a factory. Leaves: a verdict, test by test. Two transports live in
one process and are polled when their descriptors say so; `process` adds a second one.

File map:
    kit.py        how transports are built, what is checked after each write
    moving.py     what is moved lands where it should, and is reported once
    windows.py    permission, and its end
    peers.py      connections begin and end
    strangers.py  what may come over a fresh connection
    process.py    a writer in another process, which is stopped and killed
"""

from baton.testing.transport_contract.moving import MovingContract
from baton.testing.transport_contract.peers import PeerContract
from baton.testing.transport_contract.strangers import StrangerContract
from baton.testing.transport_contract.windows import WindowContract


class TransportContract(MovingContract, WindowContract, PeerContract, StrangerContract):
    """The whole suite. A subclass names its `kind`, and how a stranger reaches its listener."""


__all__ = ["TransportContract"]
