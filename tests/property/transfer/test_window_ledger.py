"""The receiver's book of who may still store where, against a model that forgets nothing."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle, TicketId
from baton.transfer.interface import Window
from baton.transfer.ledger import WindowLedger, WriterId

EPOCHS = [Epoch("a" * 32), Epoch("b" * 32)]
REGIONS = [RegionHandle(b"r" * 16), RegionHandle(b"s" * 16)]
WINDOWS = [TicketId(bytes([n]) * 16) for n in range(4)]
epochs, regions, windows = (st.sampled_from(each) for each in (EPOCHS, REGIONS, WINDOWS))


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger = WindowLedger()
        self.state = {}  # window -> "open" | "closing"
        self.able = {}  # writer -> windows it was told of and might still write
        self.connected = set()
        self.of = {}
        self.num_writers = 0

    def quiesce(self):
        blocked = {window for told in self.able.values() for window in told}
        due = [w for w, s in self.state.items() if s == "closing" and w not in blocked]
        assert sorted(self.ledger.take_quiescent()) == sorted(due)
        for window in due:
            del self.state[window]

    @rule(window=windows, epoch=epochs, region=regions)
    def open_window(self, window, epoch, region):
        asked = Window(window, region, epoch, np.arange(3))
        if window in self.state:
            with pytest.raises(TransferError):
                self.ledger.open_window(asked)
            return
        told = self.ledger.open_window(asked)
        self.state[window] = "open"
        self.of[window] = (epoch, region)
        expected = {w for w in self.connected if self.of[w] == (epoch, region)}
        assert set(told) == expected
        for writer in told:
            self.able[writer].add(window)

    @rule(window=windows)
    def close_window(self, window):
        asked = self.ledger.close_window(window)
        if self.state.get(window) == "open":
            self.state[window] = "closing"
            assert set(asked) == {w for w in self.connected if window in self.able[w]}
        else:
            assert asked == []
        self.quiesce()

    @rule(epoch=epochs, region=regions)
    def add_writer(self, epoch, region):
        writer = WriterId(self.num_writers)
        self.num_writers += 1
        told = {window.id for window in self.ledger.add_writer(writer, epoch, region)}
        self.of[writer] = (epoch, region)
        assert told == {
            w for w, s in self.state.items() if s == "open" and self.of[w] == (epoch, region)
        }
        self.able[writer] = set(told)
        self.connected.add(writer)

    @precondition(lambda self: self.connected)
    @rule(data=st.data(), window=windows)
    def confirm(self, data, window):
        writer = data.draw(st.sampled_from(sorted(self.connected)))
        if self.state.get(window) == "closing" and window in self.able[writer]:
            self.ledger.confirm_closed(writer, window)
            self.able[writer].discard(window)
        else:
            with pytest.raises(ProtocolError):
                self.ledger.confirm_closed(writer, window)
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

    @rule(window=windows)
    def notices_count_only_while_open(self, window):
        for writer in self.connected:
            expected = self.state.get(window) == "open" and window in self.able[writer]
            assert self.ledger.admits(writer, window) == expected

    @invariant()
    def consistent(self):
        self.ledger.check_invariants()


TestLedger = LedgerMachine.TestCase
