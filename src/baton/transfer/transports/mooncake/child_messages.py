"""Messages between an engine and its child process: one packet each, over a socket pair."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

import msgspec

from baton.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RUNS: Final = 2048
"""Of one order, which is one packet: 48 KiB."""
MAX_PACKET_BYTES: Final = 1 << 16

M = TypeVar("M")


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Start Mooncake, reachable over one interface."""

    host: str
    interface: str
    protocol: str
    devices: str


class Register(msgspec.Struct, frozen=True, tag="register"):
    """With a memfd: know this region."""

    region: bytes
    num_bytes: int


class SetPeer(msgspec.Struct, frozen=True, tag="set_peer"):
    """Where the peer's Mooncake answers (`host:port`), and its region's address there."""

    name: str
    base: int


class StartTransfer(msgspec.Struct, frozen=True, tag="start_transfer"):
    """Move runs, int64 `[r, 3]`: offset in our region, offset in the peer's, bytes."""

    id: int
    direction: Literal["write", "read"]
    region: bytes
    runs: bytes


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Mooncake runs, and is confined."""


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """Where peers ask for it, and the address that they need."""

    port: int
    base: int


class TransferDone(msgspec.Struct, frozen=True, tag="transfer_done"):
    """All of it is in place."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last word."""

    reason: str


Command: TypeAlias = Open | Register | SetPeer | StartTransfer
Report: TypeAlias = Started | Registered | TransferDone | Failed

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)

decode_command = _commands.decode
decode_report = _reports.decode


def receive(sock: socket.socket, decode: Callable[[bytes], M]) -> tuple[M, int | None]:
    """One packet, and the descriptor that came along.

    Raises:
        TransferError: the other side is gone.
        BlockingIOError: there is none yet, and the socket does not wait.
    """
    body, fds, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 1)
    if not body:
        raise TransferError("Mooncake's process, or the one that started it, has ended")
    return decode(body), fds[0] if fds else None
