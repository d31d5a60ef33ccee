"""Frames: how messages are told apart on a byte stream. Sans-I/O.

A frame is a 4-byte little-endian length and so many bytes of body. What a body holds is said by
who reads it: the challenge's raw bytes first, msgpack messages afterwards (docs/wire/transfer.md).
"""

from __future__ import annotations

from typing import Final

from baton.errors import ProtocolError

PREFIX_BYTES: Final = 4


def encode_frame(body: bytes) -> bytes:
    """A body with its length in front."""
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


class FrameDecoder:
    """Cuts a byte stream into bodies of at most `max_body_bytes`.

    It never holds more than was fed: a length is believed only up to the bound, and buys nothing
    by itself.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    @property
    def num_missing_bytes(self) -> int:
        """Bytes to the next boundary (a prefix's end or a body's): read so many, no payload.

        0 when `take` has a body to give.

        Raises:
            ProtocolError: the announced body is larger than the bound.
        """
        held = len(self._buffer)
        if held < PREFIX_BYTES:
            return PREFIX_BYTES - held
        return max(0, PREFIX_BYTES + self._body_bytes() - held)

    def feed(self, data: bytes) -> None:
        """Append bytes from the stream."""
        self._buffer += data

    def cut(self, data: memoryview) -> bytes | None:
        """The body of a whole frame at the beginning of `data`, which is not fed then; else None.

        Raises:
            ProtocolError: the announced body is larger than the bound.
        """
        if self._buffer or len(data) < PREFIX_BYTES:
            return None
        end = PREFIX_BYTES + self._check(int.from_bytes(data[:PREFIX_BYTES], "little"))
        return bytes(data[PREFIX_BYTES:end]) if end <= len(data) else None

    def take(self) -> bytes | None:
        """The next whole body, or None until more is fed.

        Raises:
            ProtocolError: the announced body is larger than the bound.
        """
        if len(self._buffer) < PREFIX_BYTES:
            return None
        end = PREFIX_BYTES + self._body_bytes()
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[PREFIX_BYTES:end])
        del self._buffer[:end]
        return body

    def _body_bytes(self) -> int:
        return self._check(int.from_bytes(self._buffer[:PREFIX_BYTES], "little"))

    def _check(self, announced: int) -> int:
        if announced > self.max_body_bytes:
            raise ProtocolError(
                f"a frame of {announced} bytes was announced, at most {self.max_body_bytes} "
                "are possible here"
            )
        return announced
