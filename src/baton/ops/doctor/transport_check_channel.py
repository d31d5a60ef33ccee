"""What the two processes of a trial send each other, beside the transport that is tried."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.errors import TransferError
from baton.transfer.interface import RegionDescriptor

if TYPE_CHECKING:
    import socket

FINAL_ERROR_WAIT_S: Final = 0.2
MAX_LINE_BYTES: Final = 1 << 20


class RegionReady(msgspec.Struct, frozen=True, tag="region_ready"):
    """Owner → writer: the region can be attached, its grant is open."""

    descriptor: RegionDescriptor


class PagesVerified(msgspec.Struct, frozen=True, tag="pages_verified"):
    """Owner → writer: every byte is where it should be. What the owner listens on, by the way."""

    listeners: tuple[str, ...]


class CheckFailed(msgspec.Struct, frozen=True, tag="check_failed"):
    """Owner → writer: it cannot go on."""

    reason: str


Message: TypeAlias = RegionReady | PagesVerified | CheckFailed

_decoder: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)


class Channel:
    """JSON lines between the two processes. Owner thread: the process's only one."""

    def __init__(self, sock: socket.socket) -> None:
        self.fd = sock.fileno()
        self._sock = sock
        self._text = b""

    def send(self, message: Message) -> None:
        """Send a message to the other process."""
        self._sock.sendall(msgspec.json.encode(message) + b"\n")

    def read(self) -> RegionReady | PagesVerified | None:
        """The next message, None if not all of it is here yet.

        Raises:
            TransferError: the other process failed, or died.
        """
        more = self._sock.recv(MAX_LINE_BYTES)
        if not more:
            raise TransferError("the other process died while it was tried")
        self._text += more
        line, end, rest = self._text.partition(b"\n")
        if not end:
            return None
        self._text = rest
        message = _decoder.decode(line)
        if isinstance(message, CheckFailed):
            raise TransferError(f"the other process: {message.reason}")
        return message

    def raise_peer_error(self) -> None:
        """Raise what the other process failed by, if that is how it ended."""
        while select.select([self.fd], [], [], FINAL_ERROR_WAIT_S)[0]:
            self.read()
