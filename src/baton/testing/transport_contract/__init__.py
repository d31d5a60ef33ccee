"""What every transport must do. Inherit a suite in a test module to run it.

Enters: a transport's kind, or a factory. Leaves: a verdict, test by test. Two transports live in
one process and are polled when their descriptors say so; `process` adds a second one.

File map:
    kit.py        how transports are built, what is checked after each write
    moving.py     what is moved lands where it should, and is reported once
    joining.py    writes of several arrays, where a transport takes them (`Capabilities.joins`)
    reading.py    what is read, where a transport reads (`Capabilities.reads`)
    lending.py    what is seen in place, where a transport lends (`Capabilities.lends`)
    windows.py    permission, and its end
    peers.py      connections begin and end
    strangers.py  what may come over a fresh connection
    process.py    a writer, or an owner, in another process, which is stopped and killed
    namespace.py  the same on another host, over a cable that is cut
"""

from baton.testing.transport_contract.joining import JoiningContract
from baton.testing.transport_contract.lending import LendingContract
from baton.testing.transport_contract.moving import MovingContract
from baton.testing.transport_contract.namespace import NamespaceContract
from baton.testing.transport_contract.peers import PeerContract
from baton.testing.transport_contract.process import OwnerContract, ProcessContract
from baton.testing.transport_contract.reading import ReadingContract, ReadRefusalContract
from baton.testing.transport_contract.strangers import StrangerContract
from baton.testing.transport_contract.windows import WindowContract


class TransportContract(
    MovingContract,
    JoiningContract,
    ReadingContract,
    ReadRefusalContract,
    LendingContract,
    WindowContract,
    PeerContract,
):
    """What can be asked of any transport, also of a wrapped one. A subclass names its `kind`."""


class NetworkTransportContract(TransportContract, StrangerContract, ProcessContract, OwnerContract):
    """More, for installed transports that listen: a subclass says how a stranger reaches them."""


__all__ = ["NamespaceContract", "NetworkTransportContract", "TransportContract"]
