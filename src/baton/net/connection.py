"""Non-blocking connections: an epoll with timers (`EventReactor`), and a channel inside it."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import sys
import termios
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

from baton.clock import Clock, Instant
from baton.errors import BatonError, PeerLostError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.net.channel import Channel

Handler: TypeAlias = "Callable[[], None]"

MAX_QUICK_POLLS: Final = 8
"""In a row, that return queued events and look at no descriptor."""

E = TypeVar("E")


class EventReactor(Generic[E]):
    """An epoll whose own descriptor is readable while `poll` has something to do.

    Handlers are called from `poll` alone and must not raise. A handler does a bounded amount of
    work: what remains makes its descriptor ready again. Owner thread: the one that polls.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadlines: dict[int, tuple[Instant, Handler]] = {}
        self._epoll = select.epoll()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._event_fd, select.EPOLLIN)
        self._handlers: dict[int, Handler] = {}
        self._events: list[E] = []
        self._soon: dict[int, None] = {}
        self._is_polling = self._is_signaled = False
        self._num_quick_polls = 0
        self._closed = False

    @property
    def fd(self) -> int:
        """Readable while there is something to do."""
        return self._epoll.fileno()

    def watch(self, fd: int, handler: Handler, *, mask: int = select.EPOLLIN) -> None:
        """Call `handler` whenever `fd` is ready for what `mask` names, or broken."""
        self._epoll.register(fd, mask)
        self._handlers[fd] = handler

    def rewatch(self, fd: int, mask: int) -> None:
        """Wait for something else on a watched descriptor."""
        self._epoll.modify(fd, mask)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed. Unknown ones are ignored."""
        self._soon.pop(fd, None)
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_soon(self, fd: int) -> None:
        """Call a watched descriptor's handler from the next `poll`, also if it is not ready."""
        self._soon[fd] = None
        self._signal()

    def call_after(self, key: int, delay_s: float, handler: Handler) -> None:
        """Call `handler` once, from the first `poll` after so long; replaces the key's last one.

        Timers do not make `fd` readable: the owner polls periodically.
        """
        self._deadlines[key] = (Instant(self._clock.now() + delay_s), handler)

    def cancel_call(self, key: int) -> None:
        """Forget a timer. Unknown ones are ignored."""
        self._deadlines.pop(key, None)

    def report(self, event: E) -> None:
        """Queue an event: the next `poll` returns it."""
        self._events.append(event)
        if not self._is_signaled and not self._is_polling:  # `_signal`, without a call
            self._is_signaled = True
            os.eventfd_write(self._event_fd, 1)

    def poll(self) -> list[E]:
        """Call the handlers of what is ready, once each; the queued events.

        Events that the owner's own calls queued are returned without a look at any descriptor:
        what is ready is so still, and keeps `fd` readable.
        """
        if self._closed:
            return []
        if self._events and self._num_quick_polls < MAX_QUICK_POLLS:
            self._num_quick_polls += 1
            events, self._events = self._events, []
            if self._is_signaled:
                self._update_signal()
            return events
        self._num_quick_polls = 0
        self._is_polling = True
        ready, soon = self._epoll.poll(0), self._soon
        if soon:
            self._soon = {}
            is_ready = {fd for fd, _ in ready}
            ready += [(fd, 0) for fd in soon if fd not in is_ready]
        for fd, _ in ready:
            handler = self._handlers.get(fd)  # an earlier handler may have forgotten this one
            if handler is not None:
                handler()
        self._call_overdue()
        self._is_polling = False
        events, self._events = self._events, []
        self._update_signal()
        return events

    def close(self) -> None:
        """Release the descriptors; idempotent. Queued events are dropped."""
        if not self._closed:
            self._closed = True
            self._handlers.clear()
            self._deadlines.clear()
            self._events.clear()
            os.close(self._event_fd)
            self._epoll.close()

    def _call_overdue(self) -> None:
        if not self._deadlines:
            return
        now = self._clock.now()
        for key, (deadline, handler) in list(self._deadlines.items()):
            if deadline <= now and self._deadlines.pop(key, None) is not None:
                handler()

    def _signal(self) -> None:
        """Make `fd` readable, unless a `poll` is running: it looks by itself."""
        if not self._is_signaled and not self._is_polling:
            self._is_signaled = True
            os.eventfd_write(self._event_fd, 1)

    def _update_signal(self) -> None:
        if self._soon:
            self._signal()
        elif self._is_signaled:
            self._is_signaled = False
            os.eventfd_read(self._event_fd)


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

    def send_body(self, body: bytes) -> bool:
        """Queue one frame; whether all has left, and nothing before it is unsent.

        A broken connection is reported through `on_lost`, not raised.
        """
        if not self.is_open:
            return False
        try:
            self.channel.send_message(body)
        except BatonError as exc:
            self.fail(exc)
            return False
        has_left = not self.channel.has_unsent
        if not has_left or self._mask != select.EPOLLIN:
            self._watch_sending()
        return has_left

    def send_body_with_pages(self, body: bytes, payload: Sequence[memoryview]) -> None:
        """Queue one frame, and page bytes in memory behind it; like `send_body`."""
        self._guard(self.channel.send_message, body, payload)

    def send_raw(self, frame: bytes) -> None:
        """Queue a frame of the handshake; like `send_body`."""
        self.send_batches(iter(([memoryview(frame)],)))
        self.flush()

    def send_batches(self, batches: Iterator[list[memoryview]]) -> None:
        """Queue a stream of page bytes (see `Channel`); nothing leaves before `flush`."""
        if self.is_open:
            self.channel.send_batches(batches)

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
