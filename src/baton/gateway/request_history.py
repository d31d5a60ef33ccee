"""The latest requests, remembered for `/debug/requests`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.router.placement import Placement
    from baton.telemetry.trace import RequestSpan


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request: the gateway's trace, and where it was placed last."""

    trace: RequestSpan
    placement: Placement | None
    status: int


class RequestHistory:
    """A ring of the latest `capacity` records, by request id. Of two with one id, the latest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Remember one, and forget the oldest if there is no room."""
        self._records.pop(record.trace.request_id, None)
        self._records[record.trace.request_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a request, if it is remembered still."""
        return self._records.get(request_id)

    def latest_first(self) -> Iterator[RequestRecord]:
        """All of them."""
        return reversed(self._records.values())
