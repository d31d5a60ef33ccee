"""Instants of traces that a GPU decides: when it gets to a position in what it was given to do."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.handoff.interface import StreamPosition
    from baton.telemetry.trace import RequestSpan, Stamp

logger = logging.getLogger(__name__)


class _Awaited(NamedTuple):
    position: StreamPosition
    trace: RequestSpan
    stamp: Stamp


class AwaitedStamps:
    """In the order in which the GPU gets to their positions. Owned by the agent's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._awaited: deque[_Awaited] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether none is awaited."""
        return not self._awaited

    def add(self, position: StreamPosition, trace: RequestSpan, stamp: Stamp) -> None:
        """Stamp a trace when the GPU has got to a position, none of which is before those added."""
        self._awaited.append(_Awaited(position, trace, stamp))

    def poll(self) -> bool:
        """Stamp those that the GPU has got to, with the present instant; whether it did to any."""
        has_news = False
        while self._awaited:
            position, trace, stamp = self._awaited[0]
            try:
                if not position.is_done():
                    break
                trace.stamp(stamp, self._clock.now())
            except BatonError:
                # The copy that comes after this position fails with the same, and its handoff too.
                logger.debug("handoff: the GPU has failed", exc_info=True)
            self._awaited.popleft()
            has_news = True
        return has_news
