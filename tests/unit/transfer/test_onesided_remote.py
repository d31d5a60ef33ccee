"""The initiating end of one-sided transports, beside a library that is none."""

from types import SimpleNamespace

import pytest

from baton.clock import MachineClock
from baton.errors import ProtocolError
from baton.ids import new_epoch, new_region_handle
from baton.net.framing import encode
from baton.transfer.base_transport import Reactor
from baton.transfer.interface import RegionDescriptor, RemoteId
from baton.transfer.onesided.remote import OneSidedRemote
from baton.transfer.onesided.session import Library
from baton.transfer.onesided.wire import Attached
from baton.transfer.region import place_arrays


class Session:
    is_closed = False

    def load_metadata(self, *_):
        raise ProtocolError("this is no metadata")

    def close(self):
        self.is_closed = True


def test_a_session_whose_peer_sends_no_metadata_is_closed():
    session, arrays = Session(), place_arrays([(4, 4096)])
    descriptor = RegionDescriptor("nixl", new_region_handle(), new_epoch(), arrays, "somewhere")
    reactor = Reactor(MachineClock())
    remote = OneSidedRemote(
        RemoteId(1),
        descriptor,
        reactor,
        epoch=new_epoch(),
        library=Library(lambda: session, reach="host"),
    )
    remote.set_connection(SimpleNamespace())
    channel = SimpleNamespace(receive_body=lambda: encode(Attached(arrays, b"")))
    with pytest.raises(ProtocolError):
        remote._read_first(channel)
    assert session.is_closed
    reactor.close()
