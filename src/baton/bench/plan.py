"""What will be measured, in which order. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from baton.bench.orders import MAX_POOL_PAGES
from baton.bench.workload import (
    PAGE_BYTES,
    TINY_PAGE_BYTES,
    Shape,
    Workload,
    plan_pool,
    write_size,
)
from baton.errors import ConfigError, UnknownPluginError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.bench.contender import Kind

Processes: TypeAlias = Literal["one", "two", "two on one host", "two contained"]
"""`contained`: in a network namespace of their own, where "all interfaces" is loopback."""

DEFAULT_SIZES: Final = (32 << 10, 1 << 20, 16 << 20, 100 * 10**6)
QUICK_SIZES: Final = (32 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class Entrant:
    """One row's contender: how it is built, which processes it needs, what it is measured with."""

    kind: Kind
    name: str
    options: Mapping[str, object] = field(hash=False)
    processes: Processes = "two"
    shapes: tuple[Shape, ...] = ("message", "scattered", "descriptors")
    least_bytes: int = 0


BULK: Final[tuple[Shape, ...]] = ("message", "scattered")
"""What a Python loop of copies costs for each descriptor says nothing about the machine."""
STREAM_BYTES: Final = 1_000_000
"""iperf3 knows no messages: the rate of its stream is held against large ones only."""

LIMITS: Final = (
    Entrant("limit", "memcpy", {}, "one", BULK),
    Entrant("limit", "tuned socket", {}, shapes=BULK),
)
PEERS: Final = (
    Entrant("peer", "NIXL", {}),
    Entrant("peer", "NIXL (TCP)", {}),
    Entrant("peer", "Mooncake", {}, "two contained"),
    Entrant("peer", "gloo", {}, "two on one host"),
    Entrant("peer", "socket", {}),
    Entrant("peer", "pickle", {}, "two on one host"),
    Entrant("peer", "torch.save", {}, "two on one host"),
    Entrant("peer", "iperf3", {}, "two on one host", ("message",), STREAM_BYTES),
    Entrant("peer", "iperf3 -P 2", {}, "two on one host", ("message",), STREAM_BYTES),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured: `num_rounds` with fresh processes, `budget_s` for a row of each."""

    num_rounds: int
    budget_s: float
    min_samples: int
    max_samples: int
    num_scattered_pages: int
    least_pool_pages: int


THOROUGH: Final = Effort(3, 0.4, 5, 2000, 8192, 16_384)
QUICK: Final = Effort(1, 0.05, 3, 200, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is measured. Each round goes through all entrants, then the next begins."""

    entrants: tuple[Entrant, ...]
    workloads: tuple[Workload, ...]
    effort: Effort

    @property
    def num_pool_pages(self) -> int:
        """Pages of either side's pool."""
        return plan_pool(self.workloads, self.effort.least_pool_pages)


def choose_transports(
    asked: Sequence[str], installed: Sequence[str], options: Mapping[str, Mapping[str, object]]
) -> tuple[Entrant, ...]:
    """Those that were asked for, or all that are installed.

    Raises:
        UnknownPluginError: one that was asked for is not installed.
    """
    for kind in asked:
        if kind not in installed:
            raise UnknownPluginError("baton.transports", kind, tuple(installed))
    return tuple(
        Entrant("transport", kind, options.get(kind, {}))
        for kind in dict.fromkeys(asked or installed)
    )


def make_workloads(sizes: Sequence[int], effort: Effort) -> tuple[Workload, ...]:
    """A message of each size, scattered pages, and descriptors alone.

    Raises:
        ConfigError: a pool for these sizes would be larger than this measures with.
    """
    num_pages = effort.num_scattered_pages
    messages = [Workload("message", size) for size in sorted(set(sizes))]
    workloads = (
        *messages,
        Workload("scattered", num_pages * PAGE_BYTES),
        Workload("descriptors", num_pages * TINY_PAGE_BYTES),
    )
    if plan_pool(workloads, effort.least_pool_pages) > MAX_POOL_PAGES:
        largest = write_size(MAX_POOL_PAGES * PAGE_BYTES // 2)
        raise ConfigError(f"--sizes: messages of more than {largest} cannot be measured")
    return workloads
