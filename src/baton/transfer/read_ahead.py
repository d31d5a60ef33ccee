"""What was read from a socket beyond what was asked for: a small transfer comes with one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

AHEAD_BYTES: Final = 40 << 10
"""What is page bytes of it is copied once more, which costs less than a second system call."""

Receive: TypeAlias = "Callable[[list[memoryview]], int]"
"""Fills buffers from the socket: how many bytes, 0 if none are there."""


class ReadAhead:
    """Bytes of one connection that nobody has been given yet.

    A read that did not fill the space has taken all there was: once after that, nothing is said to
    be there without asking the kernel.
    """

    def __init__(self) -> None:
        self._space = memoryview(bytearray(AHEAD_BYTES))
        self._held = memoryview(b"")
        self._was_emptied = False

    @property
    def has_bytes(self) -> bool:
        """Whether there is something that the kernel will not tell of again."""
        return bool(self._held)

    def peek(self, receive: Receive) -> memoryview:
        """What is there, and stays: valid until something is taken or skipped."""
        if not self._held:
            self._fill(receive)
        return self._held

    def skip(self, num_bytes: int) -> None:
        """Take what was looked at."""
        self._held = self._held[num_bytes:]

    def take(self, num_bytes: int, receive: Receive) -> bytes | None:
        """The next bytes, so many at most; None if none are there."""
        if not self._held and not self._fill(receive):
            return None
        taken, self._held = self._held[:num_bytes], self._held[num_bytes:]
        return bytes(taken)

    def place(self, buffers: list[memoryview], receive: Receive) -> int:
        """Put the next bytes where they belong: how many, 0 if none are there."""
        if not self._held:
            return 0 if self._is_known_empty() else receive(buffers)
        num_placed = 0
        for buffer in buffers:
            length = min(len(buffer), len(self._held))
            buffer[:length], self._held = self._held[:length], self._held[length:]
            num_placed += length
        return num_placed

    def _fill(self, receive: Receive) -> bool:
        if self._is_known_empty():
            return False
        num_received = receive([self._space])
        self._held = self._space[:num_received]
        self._was_emptied = 0 < num_received < len(self._space)
        return num_received > 0

    def _is_known_empty(self) -> bool:
        was_emptied, self._was_emptied = self._was_emptied, False
        return was_emptied
