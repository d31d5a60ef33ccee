"""Writes that travel on several streams, until all stripes of them are in place. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import ProtocolError

if TYPE_CHECKING:
    from baton.transfer.transports.tcp.wire import Data

MAX_UNFINISHED: Final = 4096
MAX_NOTIFICATION_BYTES_HELD: Final = 16 << 20
"""How far one stream of an honest peer may run ahead of another."""


@dataclass(frozen=True, slots=True)
class WholeWrite:
    """A write of which all stripes are over: in place, unless something of it was refused."""

    notification: bytes
    refusal: str | None


@dataclass(slots=True)
class _Unfinished:
    grant: bytes
    num_stripes: int
    num_over: int = 0
    notification: bytes = b""
    refusal: str | None = None


class WriteReassembly:
    """What one peer's streams have brought of writes that are not whole yet."""

    def __init__(self) -> None:
        self._unfinished: dict[int, _Unfinished] = {}
        self._num_notification_bytes = 0

    def __len__(self) -> int:
        return len(self._unfinished)

    def stripe_over(
        self, last: Data, notification: bytes, refusal: str | None
    ) -> WholeWrite | None:
        """The last part of a stripe is over; the write, if this was the last of its stripes.

        Raises:
            ProtocolError: the stripes of a write contradict each other, or too many writes wait.
        """
        write = self._unfinished.get(last.sequence)
        if write is None:
            if last.stripes == 1:
                return WholeWrite(notification, refusal)
            if len(self._unfinished) >= MAX_UNFINISHED:
                raise ProtocolError("one stream runs too far ahead of another")
            write = self._unfinished[last.sequence] = _Unfinished(last.grant, last.stripes)
        is_alike = (write.grant, write.num_stripes) == (last.grant, last.stripes)
        if not is_alike or (write.notification and notification):
            raise ProtocolError("the stripes of a write contradict each other")
        self._num_notification_bytes += len(notification)
        if self._num_notification_bytes > MAX_NOTIFICATION_BYTES_HELD:
            raise ProtocolError("one stream runs too far ahead of another")
        write.num_over += 1
        write.notification = write.notification or notification
        write.refusal = write.refusal or refusal
        if write.num_over < write.num_stripes:
            return None
        del self._unfinished[last.sequence]
        self._num_notification_bytes -= len(write.notification)
        return WholeWrite(write.notification, write.refusal)
