"""The process that Mooncake runs in, `python -m baton.transfer.transports.mooncake.mover`.

Its standard input is a socket, on which the engine that started it says what to do (`orders`). It
maps nothing but the regions that it is handed, confines what Mooncake listens on, and ends with
whoever started it.
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
from baton.transfer.messages import encode
from baton.transfer.transports.mooncake.orders import (
    Begun,
    Failed,
    Meet,
    Move,
    Moved,
    Open,
    Register,
    Registered,
    Report,
    decode_order,
    receive,
)

if TYPE_CHECKING:
    from baton.transfer.transports.mooncake.orders import Order

NUM_LISTENERS: Final = 2
"""Mooncake listens for questions about its memory, and for bytes: on all addresses."""
CONFINING_TIMEOUT_S: Final = 5.0
MAX_BATCH: Final = 1024
MAX_REASON_CHARS: Final = 512

_SERVERLESS: Final = "P2PHANDSHAKE"
_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 -- what is looked for, not bound to


class Mover:
    """One engine of Mooncake's, and the regions that it knows."""

    def __init__(self, order: Order) -> None:
        if not isinstance(order, Open):
            raise TransferError("the first order opens nothing")
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize(order.host, _SERVERLESS, order.protocol, order.devices) != 0:
            raise TransferError(f"Mooncake does not start with {order.protocol} on {order.host}")
        confine_listeners(order.interface)
        self._bases: dict[bytes, int] = {}
        self._mappings: list[mmap.mmap] = []
        self._peer = Meet("", 0)

    def obey(self, order: Order, fd: int | None) -> Report | None:
        """Carry out an order; what to answer."""
        match order:
            case Open():
                raise TransferError("Mooncake runs already")
            case Register(region, num_bytes):
                return self._register(region, num_bytes, fd)
            case Meet():
                self._peer = order
                return None
            case Move():
                return self._move(order)
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

    def _move(self, order: Move) -> Report:
        runs = np.frombuffer(order.runs, np.int64).reshape(-1, 3)
        runs = runs + np.array([self._bases[order.region], self._peer.base, 0])
        move = (
            self._engine.batch_transfer_sync_write
            if order.direction == "write"
            else self._engine.batch_transfer_sync_read
        )
        for at in range(0, len(runs), MAX_BATCH):
            ours, theirs, lengths = runs[at : at + MAX_BATCH].T.tolist()
            if move(self._peer.name, ours, theirs, lengths) != 0:
                raise TransferError("Mooncake reports that a transfer failed")
        return Moved(order.id)


def confine_listeners(interface: str) -> None:
    """Bind what Mooncake listens on to one interface. It opens the listeners in its own threads.

    Raises:
        TransferError: they did not appear.
    """
    deadline = time.monotonic() + CONFINING_TIMEOUT_S  # noqa: TID251 -- a process of its own
    confined: set[int] = set()
    while len(confined) < NUM_LISTENERS:
        if time.monotonic() > deadline:  # noqa: TID251 -- see above
            raise TransferError("Mooncake's listeners were not found, and so not confined")
        for entry in Path("/proc/self/fd").iterdir():
            if _confine(int(entry.name), interface):
                confined.add(int(entry.name))
        time.sleep(0.001)


def _confine(fd: int, interface: str) -> bool:
    """Bind a socket to the interface if it listens on all addresses; whether it does."""
    with suppress(OSError), _borrow(fd) as sock:
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and sock.getsockname()[0] in _WILDCARDS:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            return True
    return False


def _borrow(fd: int) -> socket.socket:
    duplicate = os.dup(fd)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _end_with_parent() -> None:
    """Whatever Mooncake is doing."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)  # told when the other end has gone, and of nothing else
    poller.poll()
    os._exit(0)


def main() -> None:
    """Obey until the parent is gone; an order that fails is the last one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sock = socket.socket(fileno=sys.stdin.fileno())
    try:
        order, _ = receive(sock, decode_order)
        mover = Mover(order)
        sock.send(encode(Begun()))
        while True:
            report = mover.obey(*receive(sock, decode_order))
            if report is not None:
                sock.send(encode(report))
    except (TransferError, ImportError, OSError, KeyError) as exc:
        with suppress(OSError, TransferError):
            sock.send(encode(Failed(f"{type(exc).__name__}: {exc}"[:MAX_REASON_CHARS])))
            while True:  # leaving with orders unread would take the report back
                receive(sock, bytes)


if __name__ == "__main__":
    main()
