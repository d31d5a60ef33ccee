"""Server-sent events: bytes in, each event's data out. Pure."""

from __future__ import annotations

from typing import Final

from baton.errors import ProtocolError

MAX_EVENT_BYTES: Final = 16 << 20


class EventParser:
    """Splits a stream. Lines end in LF, CR LF or CR; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_held = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is complete now.

        Raises:
            ProtocolError: an event is larger than anybody may send.
        """
        text = self._rest + data
        held = b""
        if text.endswith(b"\r"):  # perhaps half of a CR LF
            text, held = text[:-1], b"\r"
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + held
        events = [event for line in lines if (event := self._take(line)) is not None]
        if self._num_held + len(self._rest) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def _take(self, line: bytes) -> bytes | None:
        if line:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._num_held += len(line)
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data)
        self._data, self._num_held = [], 0
        return event
