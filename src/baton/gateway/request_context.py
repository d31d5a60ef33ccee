"""One client's request while it is served: what its parts note about it."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.gateway.metrics import NO_MODE, NO_MODEL, Phase
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Send

    from baton.clock import Instant
    from baton.gateway.metrics import ModelMetrics
    from baton.ids import RequestId
    from baton.router.placement import Placement
    from baton.telemetry.trace import RequestSpan


STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class RequestContext:
    """One request: where it stands. Owner: the task that serves it.

    `status` is what was sent to the client, None before. `tail` holds the last bytes of the body
    that went to the client, and is empty as long as another worker could still answer.
    """

    id: RequestId
    path: str
    received_at: Instant
    deadline: Instant
    forwarded_headers: dict[str, str]
    trace: RequestSpan
    metrics: ModelMetrics
    phase: Phase = Phase.QUEUED
    model: str = NO_MODEL
    mode: str = NO_MODE
    status: int | None = None
    tail: bytes = b""
    placement: Placement | None = None
    first_byte_timer: asyncio.TimerHandle | None = None

    @property
    def has_sent_bytes(self) -> bool:
        """Whether a part of an answer has gone to the client: there is no way back from here."""
        return bool(self.tail)

    def left_s(self, now: Instant) -> float:
        """Seconds until the deadline; not below 0."""
        return max(0.0, self.deadline - now)

    def begin_attempt(self, placement: Placement, metrics: ModelMetrics) -> None:
        """It was placed, and workers are going to be asked."""
        self.placement, self.metrics, self.mode = placement, metrics, placement.mode
        self.phase = Phase.PREFILL
        self.trace.mode = placement.mode
        prefill, decode = placement.prefill, placement.decode
        self.trace.peer = decode.id if prefill is None else f"{prefill.id} → {decode.id}"

    async def start_stream(self, send: Send) -> None:
        """Send a stream's headers, unless they were sent."""
        if self.status is None:
            self.status = HTTPStatus.OK
            headers = [*STREAM_HEADERS, (b"x-request-id", self.id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    def note_first_byte(self, now: Instant) -> None:
        """The first byte of the answer is here."""
        self.phase = Phase.DECODE
        self.trace.stamp(Stamp.FIRST_TOKEN, now)
        self.metrics.time_to_first_token.observe(now - self.received_at)
        if self.first_byte_timer is not None:
            self.first_byte_timer.cancel()
