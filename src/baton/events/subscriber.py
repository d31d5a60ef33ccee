"""Follows one publisher of KV events on a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.errors import ConfigError, ProtocolError
from baton.events.blocks import EventDomain, FeedEvent, FeedHealth, Lost, NumberedBatch, Restarted
from baton.events.sequence import Deliver, RequestReplay, Sequencer, SequencerAction
from baton.events.wire import (
    MAX_MESSAGE_BYTES,
    decode_message,
    decode_replayed,
    encode_replay_request,
    is_end_of_replay,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock
    from baton.events.endpoint import LiveEndpoint, ReplayEndpoint
    from baton.ids import WorkerId

MAX_QUEUED_REPLAYS: Final = 30_000
"""vLLM drops messages beyond this, the end marker too; the replay is then requested again. More
than a server that Baton starts keeps (`NUM_REPLAYED_STEPS`)."""

MAX_BURST: Final = 256
"""Messages read by one call, so that replies and deadlines are handled in between."""


@dataclass(frozen=True, slots=True)
class ReplayedFrames:
    """One message of the answer, unread."""

    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """The answer is complete."""


Reply: TypeAlias = ReplayedFrames | ReplayEnd


class ReplayRequest:
    """A DEALER socket of its own for each question: an answer cannot be taken for another's.

    Owner thread: the subscriber's.

    Raises:
        zmq.ZMQError: no descriptor is left.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        replay: ReplayEndpoint,
        start_seq: int,
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = MAX_QUEUED_REPLAYS
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.connect(replay.endpoint)
        self.socket.send_multipart(encode_replay_request(start_seq))

    def receive(self) -> list[Reply]:
        """What has come in, in order. Never blocks."""
        replies: list[Reply] = []
        for _ in range(MAX_BURST):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            replies.append(ReplayEnd() if is_end_of_replay(frames) else ReplayedFrames(frames))
        return replies

    def close(self) -> None:
        """Cancel the request; idempotent."""
        self.socket.close(linger=0)


MAX_QUEUED_MESSAGES: Final = 10_000
HEARTBEAT_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000
MAX_RECONNECT_MS: Final = 2_000
_WATCHED: Final = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


@dataclass(frozen=True, slots=True)
class Connected:
    """Connected to a publisher, perhaps another one than before."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The publisher is gone; libzmq goes on trying."""


@dataclass(frozen=True, slots=True)
class LiveFrames:
    """One message, unread."""

    frames: list[bytes]


Observation: TypeAlias = Connected | Disconnected | LiveFrames


class Subscription:
    """A monitored SUB socket. Made on one thread, then owned by another.

    Raises:
        ConfigError: the endpoint cannot be bound, or is none; or no descriptor is left.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], live: LiveEndpoint) -> None:
        self._topic = live.topic.encode()
        try:
            with ExitStack() as opened:
                self._open(context, live, opened)
                opened.pop_all()
        except zmq.ZMQError as exc:
            raise ConfigError(f"no KV events from {live.endpoint}: {exc}") from exc

    def _open(
        self, context: zmq.Context[zmq.Socket[bytes]], live: LiveEndpoint, opened: ExitStack
    ) -> None:
        self.socket = context.socket(zmq.SUB)
        opened.callback(self.socket.close, linger=0)
        self.socket.linger = 0
        self.socket.rcvhwm = MAX_QUEUED_MESSAGES
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self.socket.reconnect_ivl_max = MAX_RECONNECT_MS
        self.socket.subscribe(self._topic)
        self.monitor = self.socket.get_monitor_socket(_WATCHED)
        opened.callback(self.close)
        if live.bind:
            self.socket.bind(live.endpoint)
        else:
            self.socket.connect(live.endpoint)

    def receive(self) -> list[Observation]:
        """What has happened, in order. Never blocks."""
        messages = self._read(MAX_BURST)
        changes = self._read_changes()
        if any(isinstance(change, Disconnected) for change in changes):
            while self._read(MAX_BURST):
                pass
            return list(changes)
        return [*changes, *messages]

    def close(self) -> None:
        """Close both sockets; idempotent."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _read(self, limit: int) -> list[LiveFrames]:
        messages: list[LiveFrames] = []
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            # a subscription is to a prefix: `kv@pod-1` would take `kv@pod-10`, too
            if not self._topic or frames[0] == self._topic:
                messages.append(LiveFrames(frames))
        return messages

    def _read_changes(self) -> list[Connected | Disconnected]:
        changes: list[Connected | Disconnected] = []
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            changes.append(
                Connected() if event == zmq.Event.HANDSHAKE_SUCCEEDED else Disconnected()
            )
        return changes


class EventQueue:
    """A queue from one thread to another. `has_room` is asked before more is read, not enforced."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._lock = threading.Lock()
        self._items: deque[NumberedBatch | Restarted | Lost] = deque()

    @property
    def has_room(self) -> bool:
        """Whether the consumer keeps up."""
        return len(self._items) < self._max_items

    def put(self, item: NumberedBatch | Restarted | Lost) -> None:
        """Queue one item."""
        with self._lock:
            self._items.append(item)

    def take(self) -> list[FeedEvent]:
        """All events so far, in order."""
        with self._lock:
            items, self._items = self._items, deque()
        events: list[FeedEvent] = []
        for item in items:
            if isinstance(item, NumberedBatch):
                events.extend(item.batch.events)
            else:
                events.append(item)
        return events


logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S: Final = 3.0
"""Without a message of the answer. vLLM looks for questions every 0.1 s, or after each batch."""

AUDIT_INTERVAL_S: Final = 2.0
"""Of silence, after which is asked whether anything was missed: a lost message is otherwise
noticed only with the next one."""


class SubscriberLoop:
    """Owner thread: the subscriber's, except that any thread may read `health`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        subscription: Subscription,
        options: SubscriberOptions,
        *,
        queue: EventQueue,
        clock: Clock,
    ) -> None:
        self.health = FeedHealth()
        self._context, self._subscription = context, subscription
        self._options, self._queue, self._clock = options, queue, clock
        self._sequencer = Sequencer()
        self._request: ReplayRequest | None = None
        self._last_message_at = self._requested_at = clock.now()
        self._connected = False
        self._lag_s: float | None = None
        self._num_unreadable = self._num_unknown = 0

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to wait for."""
        request = [] if self._request is None else [self._request.socket]
        return [self._subscription.socket, self._subscription.monitor, *request]

    def step(self) -> None:
        """Take what has come, ask what is to be asked. Never blocks."""
        for observation in self._subscription.receive():
            self._observe(observation)
        self._read_answer()
        self._check_timeouts()
        self._report()

    def close(self) -> None:
        """Close every socket."""
        self._close_request()
        self._subscription.close()
        self._connected = False
        self._report()

    def _observe(self, observation: Observation) -> None:
        match observation:
            case Connected():
                self._connected = True
                self._perform(self._sequencer.connected())
            case Disconnected():
                self._connected = False
            case LiveFrames(frames):
                self._last_message_at = self._clock.now()
                message = self._decode(decode_message, frames)
                if message is not None:
                    self._lag_s = self._clock.unix_now() - message.batch.published_at
                    self._perform(self._sequencer.live(message))
            case _ as never:
                assert_never(never)

    def _read_answer(self) -> None:
        request = self._request
        if request is None:
            return
        for reply in request.receive():
            if self._request is not request:
                return  # what was just read made another question necessary
            self._last_message_at = self._requested_at = self._clock.now()
            match reply:
                case ReplayEnd():
                    self._close_request()
                    self._perform(self._sequencer.replay_ended())
                case ReplayedFrames(frames):
                    message = self._decode(decode_replayed, frames)
                    if message is not None:
                        self._perform(self._sequencer.replayed(message))
                case _ as never:
                    assert_never(never)

    def _check_timeouts(self) -> None:
        now = self._clock.now()
        if self._sequencer.is_replaying:
            if now - self._requested_at > REPLAY_TIMEOUT_S:
                self._close_request()
                self._perform(self._sequencer.replay_timed_out())
        elif (
            now - self._last_message_at > AUDIT_INTERVAL_S
            and self._options.replay
            and self._connected
        ):
            self._perform(self._sequencer.audit())

    def _perform(self, steps: list[SequencerAction]) -> None:
        for step in steps:
            match step:
                case Deliver(message):
                    self._queue.put(message)
                    self._num_unknown += message.batch.num_unknown
                case Restarted():
                    logger.info("%s publishes KV events anew", self._options.worker)
                    self._queue.put(step)
                case Lost(missing):
                    logger.warning(
                        "KV events of %s from number %d on are lost", self._options.worker, missing
                    )
                    self._queue.put(step)
                case RequestReplay(start):
                    self._send_request(start)
                case _ as never:
                    assert_never(never)

    def _send_request(self, start: int) -> None:
        self._close_request()
        if self._options.replay is None:
            self._perform(self._sequencer.replay_impossible())
            return
        self._requested_at = self._clock.now()
        try:
            self._request = ReplayRequest(self._context, self._options.replay, start)
        except zmq.ZMQError as exc:  # asked again in time, as where no answer comes
            logger.warning("KV events of %s cannot be asked for: %s", self._options.worker, exc)

    def _close_request(self) -> None:
        if self._request is not None:
            self._request.close()
            self._request = None

    def _decode(
        self, decode: Callable[[list[bytes], EventDomain], NumberedBatch], frames: list[bytes]
    ) -> NumberedBatch | None:
        """The message; None if it cannot be read, which leaves a gap where it was."""
        try:
            return decode(frames, self._options.domain)
        except ProtocolError as exc:
            self._num_unreadable += 1
            if self._num_unreadable == 1:
                logger.warning("%s: %s (logged once)", self._options.worker, exc)
            return None

    def _report(self) -> None:
        counts = self._sequencer.counts
        self.health = FeedHealth(
            connected=self._connected,
            state="replaying" if self._sequencer.is_replaying else "in_sync",
            last_seq=self._sequencer.last_seq,
            lag_s=self._lag_s,
            num_gaps=counts.gaps,
            num_replays=counts.replays,
            num_lost=counts.lost,
            num_restarts=counts.restarts,
            num_duplicates=counts.duplicates,
            num_unreadable=self._num_unreadable,
            num_unknown_events=self._num_unknown,
        )


TICK_MS: Final = 250
"""How often deadlines are looked at while nothing comes."""

STOP_TIMEOUT_S: Final = 5.0

MAX_SOCKETS: Final = 65_535
"""libzmq's limit. A feed has two, and a third one while it waits for an answer."""

NUM_ZMQ_DESCRIPTORS: Final = 16
"""Of a context with its first sockets, and some more."""


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """Whom to follow. Without `replay`, whatever is missed is `Lost`.

    `max_queued_batches` wait for `poll`; beyond, messages are left to ZMQ, which drops them in
    the end, and then to the replay. `rest_s`: what comes in that time is read at once, where it is
    not needed earlier; a message alone takes 0.7 ms of a processor.
    """

    worker: WorkerId
    domain: EventDomain
    live: LiveEndpoint
    replay: ReplayEndpoint | None
    max_queued_batches: int = 10_000
    rest_s: float = 0.0


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
        return FeedHealth() if self._loop is None else self._loop.health

    def start(self) -> None:
        """Open the live socket and start the thread. Once.

        Raises:
            ConfigError: the endpoint cannot be bound, or is none; or no descriptor is left.
        """
        _require_descriptors()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        # What counts is the number at the first socket; libzmq's own is 1,023, of 341 workers.
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        subscription = Subscription(context, self.options.live)
        try:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as exc:
            subscription.close()
            raise ConfigError(f"no KV events: {exc}") from exc
        self._loop = SubscriberLoop(
            context, subscription, self.options, queue=self._queue, clock=self._clock
        )
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
        return self._queue.take()

    def _run(self, follower: SubscriberLoop) -> None:
        try:
            while not self._stopping:
                self._wait(follower.sockets if self._queue.has_room else [], TICK_MS)
                if self._queue.has_room:
                    follower.step()
                if self.options.rest_s:
                    self._wait([], round(self.options.rest_s * 1000))
        except Exception:
            logger.exception("KV events of %s are no longer followed", self.options.worker)
        finally:
            follower.close()

    def _wait(self, sockets: list[zmq.Socket[bytes]], timeout_ms: int) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(timeout_ms)


def _require_descriptors() -> None:
    """Refuse what libzmq ends the process for: its first socket in a process without descriptors.

    Raises:
        ConfigError: there are too few.
    """
    with ExitStack() as opened:
        try:
            for _ in range(NUM_ZMQ_DESCRIPTORS):
                opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as exc:
            raise ConfigError(f"no KV events: {exc}; raise ulimit -n") from exc
