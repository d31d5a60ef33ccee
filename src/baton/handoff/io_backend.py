"""What an agent has of the machine it runs on: sockets, a selector, and a bell to be woken by.

The simulator has an I/O backend of its own, so that the agent it runs is this one.
"""

from __future__ import annotations

import selectors
import socket
import time
from typing import Final, Protocol

from baton.clock import read_clock_domain
from baton.transfer.adaptive_wait import PipeWaker, Waker


class NonBlockingSocket(Protocol):
    """What is used of a `socket.socket` that never blocks: one connection, or a listener."""

    def fileno(self) -> int:
        """Its number: for selectors."""
        ...

    def send(self, data: bytes | bytearray, /) -> int:
        """Send what there is room for; how many bytes."""
        ...

    def recv(self, bufsize: int, /) -> bytes:
        """What has come, at most so many bytes; nothing at the connection's end."""
        ...

    def accept(self) -> tuple[NonBlockingSocket, object]:
        """The next connection of a listener, and where it comes from."""
        ...

    def getsockopt(self, level: int, optname: int, /) -> int:
        """Of use here: whether connecting failed."""
        ...

    def setsockopt(self, level: int, optname: int, value: int, /) -> None:
        """Of use here: send at once."""
        ...

    def settimeout(self, value: float | None, /) -> None:
        """Of use here: never block."""
        ...

    def getsockname(self) -> tuple[str, int]:
        """Where a listener is bound, in its first two fields."""
        ...

    def close(self) -> None:
        """Close it; idempotent."""
        ...


class IoBackend(Protocol):
    """Makes the parts; who gets one closes it."""

    def clock_domain(self) -> str:
        """See `baton.clock.read_clock_domain`."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Let other threads run for so long: below the resolution of a selector's timeout."""
        ...

    def make_selector(self) -> selectors.BaseSelector:
        """A selector for the streams and wakers of this backend."""
        ...

    def make_waker(self) -> Waker:
        """A bell that was not rung."""
        ...

    def connect(self, host: str, port: int) -> NonBlockingSocket:
        """Begin to connect; whether it succeeds follows (`getsockopt`).

        Raises:
            OSError: refused at once.
        """
        ...

    def listen(self, host: str, port: int) -> NonBlockingSocket:
        """A listener.

        Raises:
            OSError: the address cannot be bound.
        """
        ...


class OsBackend:
    """The I/O backend of every agent outside a simulation."""

    def clock_domain(self) -> str:
        """See `IoBackend`."""
        return read_clock_domain()

    def sleep(self, duration_s: float) -> None:
        """See `IoBackend`."""
        time.sleep(duration_s)

    def make_selector(self) -> selectors.BaseSelector:
        """See `IoBackend`."""
        return selectors.DefaultSelector()

    def make_waker(self) -> Waker:
        """See `IoBackend`."""
        return PipeWaker()

    def connect(self, host: str, port: int) -> NonBlockingSocket:
        """See `IoBackend`."""
        sock = socket.socket(_family(host), socket.SOCK_STREAM)
        sock.settimeout(0)
        try:
            sock.connect((host, port))
        except BlockingIOError:
            pass  # the usual case: it goes on in the background
        except (OSError, ValueError, OverflowError) as exc:
            sock.close()
            raise OSError(str(exc)) from exc
        return sock

    def listen(self, host: str, port: int) -> NonBlockingSocket:
        """See `IoBackend`."""
        listener = socket.create_server((host, port), family=_family(host))
        listener.settimeout(0)
        return listener


OS_BACKEND: Final = OsBackend()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
