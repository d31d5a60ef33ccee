"""The receiver's book of who may still store where, against a model that forgets nothing."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle, TicketId
from baton.transfer.grants import GrantHolder, GrantLedger, WriterId
from baton.transfer.interface import WriteGrant

EPOCHS = [Epoch("a" * 32), Epoch("b" * 32)]
REGIONS = [RegionHandle(b"r" * 16), RegionHandle(b"s" * 16)]
WINDOWS = [TicketId(bytes([n]) * 16) for n in range(4)]
epochs, regions, grants = (st.sampled_from(each) for each in (EPOCHS, REGIONS, WINDOWS))


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger = GrantLedger()
        self.state = {}  # grant -> "open" | "closing"
        self.able = {}  # writer -> grants it was told of and might still write
        self.connected = set()
        self.of = {}
        self.num_writers = 0

    def quiesce(self):
        blocked = {grant for notified in self.able.values() for grant in notified}
        due = [w for w, s in self.state.items() if s == "closing" and w not in blocked]
        assert sorted(self.ledger.take_quiescent()) == sorted(due)
        for grant in due:
            del self.state[grant]

    @rule(grant=grants, epoch=epochs, region=regions)
    def open_grant(self, grant, epoch, region):
        asked = WriteGrant(grant, region, epoch, np.arange(3))
        if grant in self.state:
            with pytest.raises(TransferError):
                self.ledger.open_grant(asked)
            return
        notified = self.ledger.open_grant(asked)
        self.state[grant] = "open"
        self.of[grant] = (epoch, region)
        expected = {w for w in self.connected if self.of[w] == (epoch, region)}
        assert set(notified) == expected
        for writer in notified:
            self.able[writer].add(grant)

    @rule(grant=grants)
    def close_grant(self, grant):
        asked = self.ledger.close_grant(grant)
        if self.state.get(grant) == "open":
            self.state[grant] = "closing"
            assert set(asked) == {w for w in self.connected if grant in self.able[w]}
        else:
            assert asked == []
        self.quiesce()

    @rule(epoch=epochs, region=regions)
    def add_writer(self, epoch, region):
        writer = WriterId(self.num_writers)
        self.num_writers += 1
        notified = {
            grant.id for grant in self.ledger.add_writer(writer, GrantHolder(epoch), region)
        }
        self.of[writer] = (epoch, region)
        assert notified == {
            w for w, s in self.state.items() if s == "open" and self.of[w] == (epoch, region)
        }
        self.able[writer] = set(notified)
        self.connected.add(writer)

    @precondition(lambda self: self.connected)
    @rule(data=st.data(), grant=grants)
    def confirm(self, data, grant):
        writer = data.draw(st.sampled_from(sorted(self.connected)))
        if self.state.get(grant) == "closing" and grant in self.able[writer]:
            self.ledger.confirm_closed(writer, grant)
            self.able[writer].discard(grant)
        else:
            with pytest.raises(ProtocolError):
                self.ledger.confirm_closed(writer, grant)
        self.quiesce()

    @precondition(lambda self: self.connected)
    @rule(data=st.data())
    def disconnect(self, data):
        writer = data.draw(st.sampled_from(sorted(self.connected)))
        self.connected.discard(writer)
        assert self.ledger.disconnect(writer) == bool(self.able[writer])
        self.quiesce()

    @precondition(lambda self: self.able)
    @rule(data=st.data())
    def die(self, data):
        writer = data.draw(st.sampled_from(sorted(self.able)))
        self.connected.discard(writer)
        del self.able[writer]
        self.ledger.release(writer)
        self.quiesce()

    @rule(grant=grants)
    def notices_count_only_while_open(self, grant):
        for writer in self.connected:
            expected = self.state.get(grant) == "open" and grant in self.able[writer]
            assert self.ledger.admits(writer, grant) == expected

    @invariant()
    def consistent(self):
        self.ledger.check_invariants()


TestLedger = LedgerMachine.TestCase
