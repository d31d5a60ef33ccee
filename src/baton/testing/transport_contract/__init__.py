"""What every transport must do. Inherit a suite in a test module to run it.

Enters: a transport's kind, or a factory. Leaves: a verdict, test by test. Two transports live in
one process and are polled when their descriptors are ready; `process` adds a second one.

`TransportContract` is for every transport. What only some do has suites of its own, and a test
class inherits those that its transport claims:

    claim                         in one process         and listens (`NetworkTransportContract`)
    `Capabilities.reads`          `ReadingContract`      `NetworkReadingContract`
    `Capabilities.views`          `ViewContract`         `NetworkViewContract`
    `Capabilities.multi_array`    `MultiArrayContract`   `MultiArrayContract`
    `..late_notifications`        `LateNotificationContract`, for both
    `TracksReaders`                                      `ReaderTrackingContract`

`test_every_claim_has_its_suite` fails where claims and suites differ.

File map:
    kit.py           how transports are built, what is checked after each write
    writing.py       what is moved lands where it should, and is reported once
    reading.py       what is read, and what is seen in place
    write_grants.py  permission, and its end
    peers.py         connections begin and end, and what may come over a fresh one
    process.py       a writer, or an owner, in another process, which is stopped and killed; the
                     same on another host, over a cable that is cut
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.errors import TransferError
from baton.testing.transport_contract.peers import PeerContract, UnauthenticatedPeerContract
from baton.testing.transport_contract.process import (
    NamespaceContract,
    ProcessContract,
    ReaderTrackingContract,
    ReadOwnerContract,
    ViewOwnerContract,
)
from baton.testing.transport_contract.reading import ReadingContract, ViewContract
from baton.testing.transport_contract.write_grants import WriteGrantContract
from baton.testing.transport_contract.writing import (
    LateNotificationContract,
    MultiArrayContract,
    WriteContract,
)
from baton.transfer.interface import TracksReaders, Transport, as_reader, as_viewer

if TYPE_CHECKING:
    from baton.testing.transport_pair import TransportPair


class NetworkReadingContract(ReadingContract, ReadOwnerContract):
    """`ReadingContract`, also of an owner in another process."""


class NetworkViewContract(ViewContract, ViewOwnerContract):
    """`ViewContract`, also of an owner in another process."""


class TransportContract(WriteContract, WriteGrantContract, PeerContract):
    """What can be asked of any transport, also of a wrapped one. A subclass names its `kind`."""

    def claimed_suites(self, transport: Transport) -> dict[type, bool]:
        """Each suite that not all transports run, and whether this one claims what it tests."""
        capabilities = transport.capabilities
        return {
            ReadingContract: capabilities.reads,
            ViewContract: capabilities.views,
            MultiArrayContract: capabilities.multi_array,
            LateNotificationContract: capabilities.late_notifications,
        }

    def test_every_claim_has_its_suite(self, pair: TransportPair) -> None:
        transport = pair.writer.transport
        suites = self.claimed_suites(transport)
        assert {suite: isinstance(self, suite) for suite in suites} == suites
        for claims, narrow in (
            (transport.capabilities.reads, as_reader),
            (transport.capabilities.views, as_viewer),
        ):
            if claims:
                narrow(transport)
                continue
            with pytest.raises(TransferError, match=transport.kind):
                narrow(transport)


class NetworkTransportContract(TransportContract, UnauthenticatedPeerContract, ProcessContract):
    """More, for installed transports that listen.

    A subclass defines how an unauthenticated peer reaches them.
    """

    def claimed_suites(self, transport: Transport) -> dict[type, bool]:
        """See `TransportContract`: with the suites of other processes."""
        return super().claimed_suites(transport) | {
            ReadOwnerContract: transport.capabilities.reads,
            ViewOwnerContract: transport.capabilities.views,
            ReaderTrackingContract: isinstance(transport, TracksReaders),
        }


__all__ = [
    "LateNotificationContract",
    "MultiArrayContract",
    "NamespaceContract",
    "NetworkReadingContract",
    "NetworkTransportContract",
    "NetworkViewContract",
    "ReaderTrackingContract",
    "ReadingContract",
    "TransportContract",
    "ViewContract",
]
