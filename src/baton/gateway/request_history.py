"""What a gateway remembers of its latest requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from baton.gateway.errors import SERVER_ERROR
from baton.router.placement import Placement
from baton.telemetry.trace import RequestSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RequestRecord(msgspec.Struct, frozen=True, eq=False):
    """One request: the gateway's trace, and where it was placed last.

    `ended_at` is the gateway's monotonic clock. An answer has `num_streamed` parts or tokens.
    """

    trace: RequestSpan
    placement: Placement | None
    status: int
    ended_at: float = 0.0
    model: str = ""
    num_streamed: int = 0
    path: str = ""


def _ignore(record: RequestRecord) -> None:
    del record


class RequestHistory:
    """A ring of the latest `capacity` records, by request id. Of two with one id, the latest.

    `num_added` counts all since the start, `num_failed` those that ended with a server's error.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.num_added = self.num_failed = 0
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self.on_add: Callable[[RequestRecord], None] = _ignore

    def add(self, record: RequestRecord) -> None:
        """Remember one, and forget the oldest if there is no room."""
        self.num_added += 1
        self.num_failed += record.status >= SERVER_ERROR
        self._records.pop(record.trace.request_id, None)
        self._records[record.trace.request_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)
        self.on_add(record)

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a request, if it is remembered still."""
        return self._records.get(request_id)

    def latest_first(self) -> Iterator[RequestRecord]:
        """All of them."""
        return reversed(self._records.values())
