"""What every transport must do. Inherit a suite in a test module to run it.

Enters: a transport's kind, or a factory. Leaves: a verdict, test by test. Two transports live in
one process and are polled when their descriptors say so; `process` adds a second one.

File map:
    kit.py        how transports are built, what is checked after each write
    writing.py    what is moved lands where it should, and is reported once
    multi_array.py  writes of several arrays, where a transport takes them
    (`Capabilities.multi_array`)
    reading.py    what is read, where a transport reads (`Capabilities.reads`)
    viewing.py    what is seen in place, where a transport shows them (`Capabilities.views`)
    write_grants.py  permission, and its end
    peers.py      connections begin and end
    strangers.py  what may come over a fresh connection
    process.py    a writer, or an owner, in another process, which is stopped and killed
    namespace.py  the same on another host, over a cable that is cut
"""

from baton.testing.transport_contract.multi_array import MultiArrayContract
from baton.testing.transport_contract.namespace import NamespaceContract
from baton.testing.transport_contract.peers import PeerContract
from baton.testing.transport_contract.process import OwnerContract, ProcessContract
from baton.testing.transport_contract.reading import ReadingContract, ReadRefusalContract
from baton.testing.transport_contract.strangers import StrangerContract
from baton.testing.transport_contract.viewing import ViewContract
from baton.testing.transport_contract.write_grants import WriteGrantContract
from baton.testing.transport_contract.writing import WriteContract


class TransportContract(
    WriteContract,
    MultiArrayContract,
    ReadingContract,
    ReadRefusalContract,
    ViewContract,
    WriteGrantContract,
    PeerContract,
):
    """What can be asked of any transport, also of a wrapped one. A subclass names its `kind`."""


class NetworkTransportContract(TransportContract, StrangerContract, ProcessContract, OwnerContract):
    """More, for installed transports that listen: a subclass says how a stranger reaches them."""


__all__ = ["NamespaceContract", "NetworkTransportContract", "TransportContract"]
