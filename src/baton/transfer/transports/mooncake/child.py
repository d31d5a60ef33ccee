"""The process that Mooncake runs in, `python -m baton.transfer.transports.mooncake.child`.

Its standard input is a socket, on which the engine that started it sends commands
(`child_messages`). It maps nothing but the regions that it is handed, confines what Mooncake
listens on, and ends with whoever started it.
"""

from __future__ import annotations

import importlib
import mmap
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, assert_never

import numpy as np

from baton.errors import TransferError
from baton.net.framing import encode
from baton.transfer.transports.mooncake.session import (
    Failed,
    Open,
    Register,
    Registered,
    Report,
    SetPeer,
    Started,
    StartTransfer,
    TransferDone,
    decode_command,
    receive,
)

if TYPE_CHECKING:
    from baton.transfer.transports.mooncake.session import Command

NUM_LISTENERS: Final = {"tcp": 2, "rdma": 1}
"""Mooncake listens for handshakes, and over TCP for bytes, too: on all addresses."""
CONFINING_TIMEOUT_S: Final = 2.0
"""The peer waits 5 s for all of the start (`connect_timeout_s`), and is to get the reason."""
MAX_BATCH: Final = 1024
MAX_REASON_CHARS: Final = 512

_SERVERLESS: Final = "P2PHANDSHAKE"
_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 -- what is looked for, not bound to


class ChildServer:
    """One engine of Mooncake's, and the regions that it knows."""

    def __init__(self, command: Command) -> None:
        if not isinstance(command, Open):
            raise TransferError("the first order opens nothing")
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if (
            self._engine.initialize(command.host, _SERVERLESS, command.protocol, command.devices)
            != 0
        ):
            raise TransferError(_explain_failed_start(command))
        confine_listeners(command.interface, NUM_LISTENERS[command.protocol])
        self._bases: dict[bytes, int] = {}
        self._mappings: list[mmap.mmap] = []
        self._peer = SetPeer("", 0)

    def handle_command(self, command: Command, fd: int | None) -> Report | None:
        """Carry out an order; what to answer."""
        match command:
            case Open():
                raise TransferError("Mooncake runs already")
            case Register(region, num_bytes):
                return self._register(region, num_bytes, fd)
            case SetPeer():
                self._peer = command
                return None
            case StartTransfer():
                return self._transfer(command)
            case unknown:
                assert_never(unknown)

    def _register(self, region: bytes, num_bytes: int, fd: int | None) -> Report:
        if fd is None:
            raise TransferError("a region without memory")
        mapping = mmap.mmap(fd, num_bytes)
        os.close(fd)
        self._mappings.append(mapping)
        base = self._bases[region] = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        if self._engine.register_memory(base, num_bytes) != 0:
            raise TransferError("Mooncake cannot register the region")
        return Registered(self._engine.get_rpc_port(), base)

    def _transfer(self, command: StartTransfer) -> Report:
        runs = np.frombuffer(command.runs, np.int64).reshape(-1, 3)
        runs = runs + np.array([self._bases[command.region], self._peer.base, 0])
        transfer = (
            self._engine.batch_transfer_sync_write
            if command.direction == "write"
            else self._engine.batch_transfer_sync_read
        )
        for at in range(0, len(runs), MAX_BATCH):
            ours, theirs, lengths = runs[at : at + MAX_BATCH].T.tolist()
            if transfer(self._peer.name, ours, theirs, lengths) != 0:
                raise TransferError("Mooncake reports that a transfer failed")
        return TransferDone(command.id)


def _explain_failed_start(command: Open) -> str:
    text = f"Mooncake does not start with {command.protocol} on {command.host}"
    if command.protocol != "rdma":
        return text
    wanted = f"among {command.devices} " if command.devices else ""
    return (
        f"{text}: no RDMA device {wanted}can be used (baton doctor lists them); "
        'set mooncake.devices, or mooncake.protocol = "tcp"'
    )


def confine_listeners(interface: str, num_listeners: int) -> None:
    """Bind what Mooncake listens on to one interface. It opens the listeners in its own threads.

    Raises:
        TransferError: they did not appear.
    """
    deadline = time.monotonic() + CONFINING_TIMEOUT_S  # noqa: TID251 -- a process of its own
    confined: set[int] = set()
    while len(confined) < num_listeners:
        if time.monotonic() > deadline:  # noqa: TID251 -- see above
            raise TransferError(
                f"Mooncake opened {len(confined)} of {num_listeners} listeners to confine: "
                "install a version that Baton supports (baton doctor), or leave mooncake out of "
                "transfer.transports"
            )
        for entry in Path("/proc/self/fd").iterdir():
            if _confine(int(entry.name), interface):
                confined.add(int(entry.name))
        time.sleep(0.001)


def _confine(fd: int, interface: str) -> bool:
    """Bind a socket to the interface if it listens on all addresses; whether it does."""
    with suppress(OSError), _duplicate_socket(fd) as sock:
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and sock.getsockname()[0] in _WILDCARDS:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            return True
    return False


def _duplicate_socket(fd: int) -> socket.socket:
    duplicate = os.dup(fd)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _end_with_parent() -> None:
    """Whatever Mooncake is doing."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)  # ready when the other end is closed
    poller.poll()
    os._exit(0)


def main() -> None:
    """Obey until the parent is gone; an order that fails is the last one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sock = socket.socket(fileno=sys.stdin.fileno())
    try:
        command, _ = receive(sock, decode_command)
        server = ChildServer(command)
        sock.send(encode(Started()))
        while True:
            report = server.handle_command(*receive(sock, decode_command))
            if report is not None:
                sock.send(encode(report))
    except (TransferError, ImportError, OSError, KeyError) as exc:
        with suppress(OSError, TransferError):
            sock.send(encode(Failed(f"{type(exc).__name__}: {exc}"[:MAX_REASON_CHARS])))
            while True:  # leaving with orders unread would take the report back
                receive(sock, bytes)


if __name__ == "__main__":
    main()
