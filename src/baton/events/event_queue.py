"""What a subscriber's thread has for its consumer: bounded by leaving the sockets unread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from baton.events.blocks import NumberedBatch

if TYPE_CHECKING:
    from baton.events.blocks import FeedEvent, Lost, Restarted


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
