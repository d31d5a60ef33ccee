"""When a one-sided transport looks again at what is under way."""

import ctypes
import os

import pytest

from baton.testing.clocks import ManualClock
from baton.transfer.onesided import transport
from baton.transfer.onesided.transport import MAX_INTERVAL_S, MIN_INTERVAL_S, Pacer


class Reactor:
    def watch(self, fd, _on_ready):
        pass

    def unwatch(self, fd):
        pass


class Library:
    """libc's timers, which never expire: what they were set to, in seconds."""

    def __init__(self):
        self.set_s = []

    def timerfd_create(self, _clock, _flags):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def timerfd_settime(self, _fd, _flags, spec, _old):
        self.set_s.append(
            ctypes.cast(spec, ctypes.POINTER(transport._Spec)).contents.value_ns / 1e9
        )


@pytest.fixture
def parts(monkeypatch):
    library, clock = Library(), ManualClock()
    monkeypatch.setattr(transport, "_libc", library)
    pacer = Pacer(Reactor(), clock)
    yield pacer, library.set_s, clock
    pacer.close()


def test_the_first_transfer_after_a_pause_is_looked_at_soon(parts):
    pacer, set_s, clock = parts
    clock.advance(10)
    pacer.activate()
    pacer.pace(is_under_way=True)
    assert set_s == [MIN_INTERVAL_S]


def test_a_long_transfer_is_looked_at_seldom_until_something_happens(parts):
    pacer, set_s, clock = parts
    clock.advance(10)
    pacer.pace(is_under_way=True)
    pacer.activate()
    pacer.activate()  # it is set to that already
    assert set_s == [MAX_INTERVAL_S, MIN_INTERVAL_S]


def test_nothing_under_way_sets_no_timer(parts):
    pacer, set_s, _ = parts
    pacer.pace(is_under_way=False)
    assert set_s == []
    pacer.pace(is_under_way=True)
    pacer.pace(is_under_way=False)
    assert set_s == [MIN_INTERVAL_S, 0]
    assert not pacer.is_set
