"""Follows one publisher of KV events, on a thread of its own.

    publisher ── live ──►  thread: SubscriberLoop (sockets, Sequencer) ──► EventQueue ──► poll()
              ◄─ replay ─►

A publisher with several data-parallel ranks has an endpoint, and so a subscriber, for each.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import zmq

from baton.events.blocks import FeedHealth
from baton.events.event_queue import EventQueue
from baton.events.subscriber_loop import SubscriberLoop
from baton.events.subscription import Subscription

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.events.blocks import EventDomain, FeedEvent
    from baton.events.endpoint import LiveEndpoint, ReplayEndpoint
    from baton.ids import WorkerId

logger = logging.getLogger(__name__)

TICK_MS: Final = 250
"""How often deadlines are looked at while nothing comes."""

STOP_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """Whom to follow. Without `replay`, whatever is missed is `Lost`.

    `max_queued_batches` wait for `poll`; beyond, messages are left to ZMQ, which drops them in
    the end, and then to the replay.
    """

    worker: WorkerId
    domain: EventDomain
    live: LiveEndpoint
    replay: ReplayEndpoint | None
    max_queued_batches: int = 10_000


class KVEventSubscriber:
    """Implements `KVEventFeed`. `poll` belongs to one thread; `stop` follows `start`, on any."""

    def __init__(self, options: SubscriberOptions, clock: Clock) -> None:
        self.options = options
        self._clock = clock
        self._queue = EventQueue(options.max_queued_batches)
        self._loop: SubscriberLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake_fd = -1

    @property
    def health(self) -> FeedHealth:
        """See `KVEventFeed`."""
        return FeedHealth() if self._loop is None else self._loop.health

    def start(self) -> None:
        """Open the live socket and start the thread. Once.

        Raises:
            ConfigError: the endpoint cannot be bound, or is none.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        subscription = Subscription(context, self.options.live)
        self._loop = SubscriberLoop(
            context, subscription, self.options, queue=self._queue, clock=self._clock
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run,
            args=(self._loop,),
            name=f"kv-events-{self.options.worker}",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, close the sockets. Idempotent; what was not polled can still be."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping = True
            os.eventfd_write(self._wake_fd, 1)
            thread.join(STOP_TIMEOUT_S)
            os.close(self._wake_fd)

    def poll(self) -> list[FeedEvent]:
        """See `KVEventFeed`."""
        return self._queue.take()

    def _run(self, follower: SubscriberLoop) -> None:
        try:
            while not self._stopping:
                self._wait(follower)
                if self._queue.has_room:
                    follower.step()
        except Exception:
            logger.exception("KV events of %s are no longer followed", self.options.worker)
        finally:
            follower.close()

    def _wait(self, follower: SubscriberLoop) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._queue.has_room:
            for socket in follower.sockets:
                poller.register(socket, zmq.POLLIN)
        poller.poll(TICK_MS)
