"""Handoffs in vLLM's own log and metrics: `vllm:baton_*` (docs/wire/vllm.md lists them).

Each engine step ships what ended since the last one; vLLM adds it up, over ranks and time, and
rebuilds it in its API server.
"""

from __future__ import annotations

from collections import Counter as Tally
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from baton.engines.vllm.rank_observer import HandoffRecord
from baton.telemetry.handoff_metrics import TRANSFER_EDGES_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HANDOFFS: Final = "handoffs"
REFUSED: Final = "refused"


class BatonStats(KVConnectorStats):  # type: ignore[misc] # vLLM is untyped for us
    """`data` has `handoffs`, a list of `HandoffRecord` as dicts, and `refused`, counts by code."""

    data: dict[str, Any]

    @classmethod
    def of(cls, records: Sequence[HandoffRecord], refused: Mapping[str, int]) -> BatonStats | None:
        """What is worth shipping; None where nothing happened."""
        if not records and not refused:
            return None
        return cls(data={HANDOFFS: msgspec.to_builtins(list(records)), REFUSED: dict(refused)})

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data.get(HANDOFFS) and not self.data.get(REFUSED)

    def aggregate(self, other: BatonStats) -> BatonStats:
        self.data = {
            HANDOFFS: [*self.data.get(HANDOFFS, ()), *other.data.get(HANDOFFS, ())],
            REFUSED: dict(Tally(self.data.get(REFUSED, {})) + Tally(other.data.get(REFUSED, {}))),
        }
        return self

    def reduce(self) -> dict[str, int | float]:
        """See `KVConnectorStats`: one line of vLLM's log."""
        records = read_records(self.data)
        line: dict[str, int | float] = {}
        for side in ("sent", "received"):
            ended = [record for record in records if record.side == side]
            if not ended:
                continue
            good = [record for record in ended if record.failed_stage is None]
            line[f"baton {side}"] = len(good)
            line[f"{side} MB"] = round(sum(record.num_bytes for record in good) / 1e6, 3)
            line[f"{side} wait ms (mean)"] = round(
                1e3 * sum(record.wait_s for record in ended) / len(ended), 2
            )
            line[f"{side} failed"] = len(ended) - len(good)
        refused = sum(self.data.get(REFUSED, {}).values())
        return {**line, "refused tickets": refused} if refused else line


class BatonPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc] # vLLM is untyped for us
    """The same on vLLM's `/metrics`, with vLLM's labels and our own behind them."""

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - passed on as they are
        super().__init__(*args)
        self._counters = {
            name: self._make(self._counter_cls, name, text, labels)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: self._make(
                self._histogram_cls, name, text, labels, buckets=list(TRANSFER_EDGES_S)
            )
            for name, (text, labels) in _HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for record in read_records(transfer_stats_data):
            self._observe(record, engine_idx)
        for code, count in transfer_stats_data.get(REFUSED, {}).items():
            self._count("refused_tickets", engine_idx, count, code)

    def _observe(self, record: HandoffRecord, engine_idx: int) -> None:
        side, transport = record.side, record.transport
        if record.failed_stage is not None:
            self._count("failed_handoffs", engine_idx, 1, side, record.failed_stage, transport)
            return
        self._count("handoffs", engine_idx, 1, side, transport)
        self._count("bytes", engine_idx, record.num_bytes, side, transport)
        self._count("pages", engine_idx, record.num_pages, side, transport)
        if transport != record.expected_transport:
            self._count("transport_mismatches", engine_idx, 1, record.expected_transport, transport)
        if side == "received":
            self._time("load_wait_seconds", engine_idx, record.wait_s, transport)
        if record.transfer_s is not None:
            self._time("handoff_seconds", engine_idx, record.transfer_s, transport)

    def _make(
        self,
        kind: Any,  # noqa: ANN401 - one of vLLM's wrappers of Prometheus' classes
        name: str,
        text: str,
        labels: tuple[str, ...],
        **options: object,
    ) -> Any:  # noqa: ANN401
        return kind(
            name=f"vllm:baton_{name}",
            documentation=text,
            labelnames=[*self._labelnames, *labels],
            **options,
        )

    def _count(self, name: str, engine_idx: int, amount: int, *labels: str) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        self._counters[name].labels(*values, *labels).inc(amount)

    def _time(self, name: str, engine_idx: int, seconds: float, *labels: str) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        self._histograms[name].labels(*values, *labels).observe(seconds)


_COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "handoffs": ("Handoffs that ended well.", ("side", "transport")),
    "bytes": ("KV handed over.", ("side", "transport")),
    "pages": ("Pages of KV handed over.", ("side", "transport")),
    "failed_handoffs": (
        "Handoffs that ended without their KV.",
        ("side", "stage", "transport"),
    ),
    "refused_tickets": ("Requests computed here because of their ticket.", ("code",)),
    "transport_mismatches": (
        "Handoffs over another transport than the one expected between the two workers.",
        ("expected", "used"),
    ),
}
_HISTOGRAMS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "handoff_seconds": (
        "Time from the first layer computed to the last one landed, where KV was received.",
        ("transport",),
    ),
    "load_wait_seconds": (
        "Time for which a request waited for its KV, blocks in hand.",
        ("transport",),
    ),
}


def read_records(data: Mapping[str, Any]) -> list[HandoffRecord]:
    """The records in what vLLM carried."""
    return msgspec.convert(data.get(HANDOFFS, []), list[HandoffRecord])
