"""An epoll with timers, and a queue of events that `poll` returns."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from baton.clock import Instant

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock

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
        self._signal()

    def poll(self) -> list[E]:
        """Call the handlers of what is ready, once each; the queued events.

        Events that the owner's own calls queued are returned without a system call: `fd` stays
        readable then, and the next `poll` looks at everything.
        """
        if self._closed:
            return []
        if self._events and self._num_quick_polls < MAX_QUICK_POLLS:
            self._num_quick_polls += 1
            events, self._events = self._events, []
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
