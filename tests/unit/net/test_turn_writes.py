"""What a turn of the event loop has for clients."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.net.turn_writes import TurnWrites


class ClosedError(Exception):
    """As uvloop raises of a handle that is closed."""


@dataclass
class Transport:
    is_closed: bool = False
    written: bytes = b""
    is_aborted: bool = False

    def write(self, data: bytes) -> None:
        if self.is_closed:
            raise ClosedError
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True


@dataclass
class Stream:
    transport: Transport
    held_back: list[bytes] = field(default_factory=lambda: [b"a", b"b"])
    disconnected: bool = False


def test_what_cannot_be_written_costs_its_own_client_only(caplog):
    batch = TurnWrites()
    closed, gone, open_ = (
        Stream(Transport(is_closed=True)),
        Stream(Transport()),
        Stream(Transport()),
    )
    gone.disconnected = True
    batch.writers.extend([closed, gone, open_])
    batch.flush()
    assert [each.transport.written for each in (closed, gone, open_)] == [b"", b"", b"ab"]
    assert [each.transport.is_aborted for each in (closed, gone, open_)] == [True, False, False]
    assert not batch.writers
    assert "could not be written" in caplog.text
    open_.held_back = [b"c"]
    batch.writers.append(open_)
    batch.flush()
    assert open_.transport.written == b"abc"
