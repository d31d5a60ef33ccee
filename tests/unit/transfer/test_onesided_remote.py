"""The initiating end of one-sided transports, beside a library that is none."""

import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from baton.clock import MachineClock
from baton.errors import ProtocolError, TransferError
from baton.ids import new_epoch, new_region_handle, new_ticket_id
from baton.kv.copies import PageCopies
from baton.net.framing import encode
from baton.testing.transport_pair import whole_pages
from baton.transfer.base_transport import Reactor
from baton.transfer.grant_messages import MemoryReleased
from baton.transfer.interface import PageWrite, RegionDescriptor, RemoteId, TransferId
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


class Engine:
    """Ends, as NIXL's does, with the last reference to it."""

    def post(self):
        raise TransferError("the link is down")


class FailingSession(Session):
    needs_serving = False

    def __init__(self):
        self._engine = Engine()
        self.engine = weakref.ref(self._engine)

    def load_metadata(self, *_):
        pass

    def post(self, *_):
        engine = self._engine
        engine.post()

    def close(self):
        self._engine = None


ARRAYS = place_arrays([(4, 4096)])
CHANNEL = SimpleNamespace(receive_body=lambda: encode(Attached(ARRAYS, b"")))


@pytest.fixture
def reactor():
    reactor = Reactor(MachineClock())
    yield reactor
    reactor.close()


def make_remote(reactor, session, connection):
    descriptor = RegionDescriptor("nixl", new_region_handle(), new_epoch(), ARRAYS, "somewhere")
    library = Library(lambda: session, reach="host")
    remote = OneSidedRemote(RemoteId(1), descriptor, reactor, epoch=new_epoch(), library=library)
    remote.set_connection(connection)
    return remote


def test_a_session_whose_peer_sends_no_metadata_is_closed(reactor):
    session = Session()
    with pytest.raises(ProtocolError):
        make_remote(reactor, session, SimpleNamespace())._read_first(CHANNEL)
    assert session.is_closed


@pytest.mark.parametrize("direction", ["write", "read"])
def test_an_engine_that_fails_has_ended_before_its_peer_gets_the_memory_back(reactor, direction):
    """The frames of what it raised hold it, too."""
    session, connection, sent = FailingSession(), MagicMock(), []
    connection.send_body = lambda body: sent.append((body, session.engine()))
    remote = make_remote(reactor, session, connection)
    remote._read_first(CHANNEL)
    copies = PageCopies(0, (whole_pages([0], [0], 4096),))
    if direction == "read":
        remote.read(TransferId(1), copies, None)
    else:
        grant = new_ticket_id()
        remote.admit_writes(grant, np.array([0]))
        write = PageWrite(remote.id, grant, new_region_handle(), copies, b"")
        remote.submit(TransferId(1), write, None)
    assert sent == [(encode(MemoryReleased()), None)]
