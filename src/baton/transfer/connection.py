"""A channel under watch: what happens to it becomes calls, and it fails exactly once."""

from __future__ import annotations

import logging
import select
from typing import TYPE_CHECKING, TypeAlias

from baton.errors import BatonError, PeerLostError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.transfer.channel import Channel
    from baton.transfer.reactor import Reactor

_log = logging.getLogger(__name__)

OnReadable: TypeAlias = "Callable[[Channel], None]"
OnLost: TypeAlias = "Callable[[TransferError], None]"


class Connection:  # noqa: PLR0904 -- what a channel does, and what happens to it
    """One peer's socket inside a reactor. Owner thread: the transport's.

    `on_readable` reads a bounded amount and may raise any `BatonError`: that ends this connection,
    and nothing else. `on_lost` is called once, after the socket was closed, unless `close` was
    called first.
    """

    def __init__(
        self, reactor: Reactor, channel: Channel, on_readable: OnReadable, on_lost: OnLost
    ) -> None:
        self.channel = channel
        self._reactor = reactor
        self._on_readable, self._on_lost = on_readable, on_lost
        self._open = True
        self._fd = channel.socket.fileno()
        self._mask = select.EPOLLIN
        reactor.watch(self._fd, self.step, mask=self._mask)

    @property
    def is_open(self) -> bool:
        """Whether the socket is still there."""
        return self._open

    def set_handlers(self, on_readable: OnReadable, on_lost: OnLost) -> None:
        """Change what happens next: the connection entered another phase of its protocol."""
        self._on_readable, self._on_lost = on_readable, on_lost

    def fail_after(self, delay_s: float, what: str) -> None:
        """Lose the connection unless `settle` is called in time."""
        self._reactor.call_after(
            self._fd,
            delay_s,
            lambda: self.fail(PeerLostError(f"{what} took longer than {delay_s} s")),
        )

    def fail_unless_progress(self, delay_s: float, what: str, measure: Callable[[], int]) -> None:
        """Lose the connection once `measure` has not changed for `delay_s` (to twice that).

        Until `settle` is called, or another delay is set.
        """
        # Nothing is measured now: most transfers are over before anybody would look.
        self._check_progress(delay_s, what, measure, None)

    def _check_progress(
        self, delay_s: float, what: str, measure: Callable[[], int], before: int | None
    ) -> None:
        def look() -> None:
            measured = measure()
            if measured == before:
                self.fail(PeerLostError(f"{what}: nothing has moved for {delay_s} s"))
            else:
                self._check_progress(delay_s, what, measure, measured)

        self._reactor.call_after(self._fd, delay_s, look)

    def cancel_deadline(self) -> None:
        """What `fail_after`, or `fail_unless_progress`, waited for has happened."""
        self._reactor.cancel_call(self._fd)

    def send_body(self, body: bytes) -> None:
        """Queue one frame. A broken connection is reported through `on_lost`, not raised."""
        self._guard(lambda: self.channel.send_body(body))

    def send_raw(self, frame: bytes) -> None:
        """Queue bytes that are frames already; like `send_body`."""
        self._guard(lambda: self.channel.send_raw(frame))

    def send_batches(self, batches: Iterator[list[memoryview]]) -> None:
        """Queue a stream of page bytes (see `Channel`); nothing leaves before `flush`."""
        if self._open:
            self.channel.send_batches(batches)

    def send_batch(self, batch: list[memoryview]) -> None:
        """Queue page bytes, all at hand; like `send_body`."""
        self._guard(lambda: self.channel.send_batch(batch))

    def flush(self) -> None:
        """Send what the kernel takes now. A broken connection is reported through `on_lost`."""
        self._guard(self.channel.flush)

    def send_body_with_fd(self, body: bytes, fd: int) -> None:
        """Send one frame and a descriptor (see `Channel`); like `send_body`."""
        self._guard(lambda: self.channel.send_body_with_fd(body, fd))

    def step(self) -> None:
        """Read, then send: what the peer said before it went is heard even if sending fails."""
        self._guard(lambda: self._on_readable(self.channel))
        if self._open and self.channel.has_unsent:
            self._guard(self.channel.flush)
        if self._open and self.channel.has_buffered_input:
            self.step_soon()

    def step_soon(self) -> None:
        """Be stepped by the next `poll`, whether or not the peer says something."""
        if self._open:
            self._reactor.call_soon(self._fd)

    def fail(self, error: BatonError) -> None:
        """End the connection because of `error`; `on_lost` is told, once."""
        if not self._open:
            return
        if not isinstance(error, TransferError):
            _log.warning("a transfer connection was ended: %s", error)
        on_lost = self._on_lost
        self.close()
        on_lost(_as_lost(error))

    def close(self) -> None:
        """End the connection and tell nobody; idempotent."""
        if self._open:
            self._open = False
            self._reactor.cancel_call(self._fd)
            self._reactor.unwatch(self._fd)
            self.channel.close()
            # They refer back to here: let go, so that the memory they view is free at once.
            self._on_readable, self._on_lost = _ignore, _ignore

    def _guard(self, action: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            action()
        except BatonError as exc:
            self.fail(exc)
        else:
            self._watch_sending()

    def _watch_sending(self) -> None:
        """Be called when the peer takes more, but only while there is more."""
        if not self._open or (self._mask == select.EPOLLIN and not self.channel.has_unsent):
            return
        can_send = self.channel.has_unsent and not self.channel.waits_for_peer
        mask = select.EPOLLIN | (select.EPOLLOUT if can_send else 0)
        if mask != self._mask:
            self._mask = mask
            self._reactor.rewatch(self._fd, mask)


def _ignore(_: Channel | TransferError) -> None:
    """A closed connection tells nobody anything."""


def _as_lost(error: BatonError) -> TransferError:
    if isinstance(error, TransferError):
        return error
    lost = TransferError(str(error))
    lost.__cause__ = error
    return lost
