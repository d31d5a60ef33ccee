"""One question for what was missed, and its answer as it comes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import zmq

from baton.events.wire import MAX_MESSAGE_BYTES, encode_replay_request, is_end_of_replay

if TYPE_CHECKING:
    from baton.events.endpoint import ReplayEndpoint

MAX_QUEUED_MESSAGES: Final = 20_000
"""vLLM drops what finds no room on the way, the end of the answer too; it is asked again then."""

MAX_BURST: Final = 256


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
        self.socket.rcvhwm = MAX_QUEUED_MESSAGES
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
        """Give up on the answer; idempotent."""
        self.socket.close(linger=0)
