"""Memory that handoffs hold on prefill workers: blocks times seconds, by mode.

    hold ──resize (as blocks are allocated, or some freed)──► prefill_done ──► release
    └─────────────── `computing` ───────────────┘└──── `waiting` ────┘

`computing` is the same work in every mode; `waiting`, from the end of prefill on, is what the mode
costs. A page is one layer's part of a block: block-seconds times layers are page-seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.auth.ticket import HandoffMode

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from prometheus_client import Metric

    from baton.clock import Instant

Phase: TypeAlias = Literal["computing", "waiting"]
HeldBlockSeconds: TypeAlias = "dict[tuple[HandoffMode, Phase], float]"

MODES: Final[tuple[HandoffMode, ...]] = get_args(HandoffMode)
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


@dataclass(slots=True)
class _Hold:
    mode: HandoffMode
    since: Instant
    num_blocks: int = 0
    phase: Phase = "computing"


class HeldBlockTime:
    """What each handoff holds, and the sums of what all have held. Owned by the engine's thread.

    A block that several handoffs share counts for each. Keys that are not held are ignored.
    """

    def __init__(self) -> None:
        self._holds: dict[Hashable, _Hold] = {}
        self._sums: HeldBlockSeconds = {(mode, phase): 0.0 for mode in MODES for phase in PHASES}

    @property
    def block_seconds(self) -> HeldBlockSeconds:
        """Sums up to each hold's last change: what is held goes in when it is released."""
        return dict(self._sums)

    def hold(self, key: Hashable, mode: HandoffMode, at: Instant) -> None:
        """A handoff begins to hold blocks: none yet."""
        self._holds[key] = _Hold(mode, at)

    def resize(self, key: Hashable, num_blocks: int, at: Instant) -> None:
        """It holds so many blocks from now on."""
        hold = self._count(key, at)
        if hold is not None:
            hold.num_blocks = num_blocks

    def prefill_done(self, key: Hashable, at: Instant) -> None:
        """All of the prompt's KV is there: from now on its blocks only wait."""
        hold = self._count(key, at)
        if hold is not None:
            hold.phase = "waiting"

    def release(self, key: Hashable, at: Instant) -> None:
        """It holds nothing any more."""
        self._count(key, at)
        self._holds.pop(key, None)

    def __len__(self) -> int:
        return len(self._holds)

    def _count(self, key: Hashable, at: Instant) -> _Hold | None:
        hold = self._holds.get(key)
        if hold is None:
            return None
        self._sums[hold.mode, hold.phase] += hold.num_blocks * (at - hold.since)
        hold.since = at
        return hold


class HeldBlockTimeCollector(Collector):
    """Shows the sums at each scrape. `read` must be thread-safe."""

    def __init__(self, read: Callable[[], Mapping[tuple[HandoffMode, Phase], float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = CounterMetricFamily(
            "baton_handoff_held_block_seconds",
            "Blocks of prompts that are handed over, times how long they were held here.",
            labels=["mode", "phase"],
        )
        for labels, block_s in self._read().items():
            family.add_metric(labels, block_s)
        yield family

    def describe(self) -> Iterable[Metric]:
        """See `Collector`: nothing, so that registering reads nothing."""
        return ()
