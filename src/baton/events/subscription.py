"""A publisher's sockets: the live subscription and replay requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.errors import ConfigError
from baton.events.wire import MAX_MESSAGE_BYTES, encode_replay_request, is_end_of_replay

if TYPE_CHECKING:
    from baton.events.endpoint import LiveEndpoint, ReplayEndpoint

MAX_QUEUED_REPLAYS: Final = 20_000
"""vLLM drops messages beyond this, the end marker too; the replay is then requested again."""

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
        ConfigError: the endpoint cannot be bound, or is none.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], live: LiveEndpoint) -> None:
        self._topic = live.topic.encode()
        self.socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvhwm = MAX_QUEUED_MESSAGES
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self.socket.reconnect_ivl_max = MAX_RECONNECT_MS
        self.socket.subscribe(self._topic)
        self.monitor = self.socket.get_monitor_socket(_WATCHED)
        try:
            if live.bind:
                self.socket.bind(live.endpoint)
            else:
                self.socket.connect(live.endpoint)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"no KV events from {live.endpoint}: {exc}") from exc

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
