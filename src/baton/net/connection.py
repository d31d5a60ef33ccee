"""A channel inside a reactor: readiness becomes calls, and it fails exactly once."""

from __future__ import annotations

import fcntl
import logging
import select
import sys
import termios
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

from baton.errors import BatonError, PeerLostError, TransferError
from baton.net.framing import encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.net.channel import Channel
    from baton.net.reactor import EventReactor

P = ParamSpec("P")

_log = logging.getLogger(__name__)

OnReadable: TypeAlias = "Callable[[Channel], None]"
OnLost: TypeAlias = "Callable[[TransferError], None]"


class Connection:
    """One peer's socket inside a reactor. Owner thread: the reactor's.

    `on_readable` reads a bounded amount and may raise any `BatonError`: that ends this connection,
    and nothing else. `on_lost` is called once, after the socket was closed, unless `close` was
    called first.
    """

    def __init__(
        self, reactor: EventReactor[Any], channel: Channel, on_readable: OnReadable, on_lost: OnLost
    ) -> None:
        self.channel = channel
        self._reactor = reactor
        self._on_readable, self._on_lost = on_readable, on_lost
        self.is_open = True
        self._fd = channel.socket.fileno()
        self._mask = select.EPOLLIN
        reactor.watch(self._fd, self.step, mask=self._mask)

    def set_handlers(self, on_readable: OnReadable, on_lost: OnLost) -> None:
        """Change what happens next: the connection entered another phase of its protocol."""
        self._on_readable, self._on_lost = on_readable, on_lost

    def fail_after(self, delay_s: float, what: str) -> None:
        """Fail the connection unless `cancel_deadline` is called in time."""
        self._reactor.call_after(
            self._fd,
            delay_s,
            lambda: self.fail(PeerLostError(f"{what} took longer than {delay_s} s")),
        )

    def fail_unless_progress(self, delay_s: float, what: str, measure: Callable[[], int]) -> None:
        """Fail the connection once `measure` has not changed for `delay_s` (to twice that).

        Until `cancel_deadline` is called, or another delay is set.
        """
        before: int | None = None  # measured by the first timer: most transfers are over by then

        def check() -> None:
            nonlocal before
            measured = measure()
            if measured == before:
                self.fail(PeerLostError(f"{what}: nothing has moved for {delay_s} s"))
            else:
                before = measured
                self._reactor.call_after(self._fd, delay_s, check)

        self._reactor.call_after(self._fd, delay_s, check)

    def cancel_deadline(self) -> None:
        """Stop the timer of `fail_after` or `fail_unless_progress`."""
        self._reactor.cancel_call(self._fd)

    def send_body(self, body: bytes) -> None:
        """Queue one frame. A broken connection is reported through `on_lost`, not raised."""
        self._guard(self.channel.send_raw, encode_frame(body))

    def send_raw(self, frame: bytes) -> None:
        """Queue encoded frames; like `send_body`."""
        self._guard(self.channel.send_raw, frame)

    def send_batches(self, batches: Iterator[list[memoryview]]) -> None:
        """Queue a stream of page bytes (see `Channel`); nothing leaves before `flush`."""
        if self.is_open:
            self.channel.send_batches(batches)

    def send_batch(self, batch: list[memoryview]) -> None:
        """Queue page bytes in memory; like `send_body`."""
        self._guard(self.channel.send_batch, batch)

    def flush(self) -> None:
        """Send what the kernel takes now. A broken connection is reported through `on_lost`."""
        self._guard(self.channel.flush)

    def send_body_with_fd(self, body: bytes, fd: int) -> None:
        """Send one frame and a descriptor (see `Channel`); like `send_body`."""
        self._guard(self.channel.send_body_with_fd, body, fd)

    def step(self) -> None:
        """Read, then send: a peer's last messages are handled even if sending fails."""
        self._guard(self._read_and_flush)
        if self.is_open and self.channel.has_buffered_input:
            self.step_soon()

    def step_soon(self) -> None:
        """Have the next `poll` call `step`, whether or not there is input."""
        if self.is_open:
            self._reactor.call_soon(self._fd)

    def fail(self, error: BatonError) -> None:
        """End the connection because of `error` and call `on_lost`, once."""
        if not self.is_open:
            return
        if not isinstance(error, TransferError):
            _log.warning("a transfer connection was ended: %s", error)
        on_lost = self._on_lost
        self.close()
        on_lost(_as_lost(error))

    def close(self) -> None:
        """End the connection without calling `on_lost`; idempotent."""
        if self.is_open:
            self.is_open = False
            self._reactor.cancel_call(self._fd)
            self._reactor.unwatch(self._fd)
            self.channel.close()
            # They refer back to here: dropped, so that the memory they view is freed at once.
            self._on_readable, self._on_lost = _ignore, _ignore

    def _read_and_flush(self) -> None:
        self._on_readable(self.channel)
        if self.channel.has_unsent:
            self.channel.flush()

    def _guard(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.is_open:
            return
        try:
            action(*args, **kwargs)
        except BatonError as exc:
            self.fail(exc)
        else:
            self._watch_sending()

    def _watch_sending(self) -> None:
        """Wait for writability, but only while something is unsent."""
        if not self.is_open or (self._mask == select.EPOLLIN and not self.channel.has_unsent):
            return
        can_send = self.channel.has_unsent and not self.channel.waits_for_peer
        mask = select.EPOLLIN | (select.EPOLLOUT if can_send else 0)
        if mask != self._mask:
            self._mask = mask
            self._reactor.rewatch(self._fd, mask)


def _ignore(_: Channel | TransferError) -> None:
    """The handlers of a closed connection."""


def _as_lost(error: BatonError) -> TransferError:
    if isinstance(error, TransferError):
        return error
    lost = TransferError(str(error))
    lost.__cause__ = error
    return lost


class InboundPoller:
    """Reads one connection within another call: poll() is cheaper than a failed recv()."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.channel.socket, select.POLLIN)

    def poll_inbound(self) -> None:
        """Step the connection if there is input or the peer is gone."""
        if self._connection.is_open and self._poll.poll(0):
            self._connection.step()


def count_moved_bytes(channel: Channel) -> int:
    """A number that changes while the peer's kernel acknowledges bytes, or the peer sends some.

    Bytes in this side's send buffer do not count: it takes megabytes for a stopped peer. Unread
    bytes in its receive buffer do.
    """
    num_unsent, num_unread = (
        _query(channel.socket.fileno(), request) for request in (termios.TIOCOUTQ, termios.FIONREAD)
    )
    return channel.num_sent_bytes - num_unsent + channel.num_received_bytes + num_unread


def _query(fd: int, request: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, request, bytes(4)), sys.byteorder)
