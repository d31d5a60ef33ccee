"""Which backends and workloads are measured, in which order. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, UnknownPluginError
from baton.rig.backend import BackendSpec
from baton.rig.messages import MAX_POOL_PAGES
from baton.rig.pages import PAGE_BYTES, TINY_PAGE_BYTES, Shape, Workload, format_size, plan_pool
from baton.rig.pair import SampleBudget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_SIZES: Final = (32 << 10, 1 << 20, 16 << 20, 100 * 10**6)
QUICK_SIZES: Final = (32 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class LinkEntry(BackendSpec):
    """A backend, and the workloads that it is measured with."""

    shapes: tuple[Shape, ...] = ("message", "scattered", "descriptors")
    least_bytes: int = 0


BULK: Final[tuple[Shape, ...]] = ("message", "scattered")
"""A Python loop's cost of a descriptor is no property of the machine."""
STREAM_BYTES: Final = 1_000_000
"""iperf3 has no messages: the rate of its stream is compared with large ones only."""

LIMITS: Final = (
    LinkEntry("limit", "memcpy", {}, "one", BULK),
    LinkEntry("limit", "tuned socket", {}, shapes=BULK),
)
PEERS: Final = (
    LinkEntry("peer", "NIXL", {}),
    LinkEntry("peer", "NIXL (TCP)", {}),
    LinkEntry("peer", "Mooncake", {}, "two contained"),
    LinkEntry("peer", "gloo", {}, "two on one host"),
    LinkEntry("peer", "socket", {}),
    LinkEntry("peer", "pickle", {}, "two on one host"),
    LinkEntry("peer", "torch.save", {}, "two on one host"),
    LinkEntry("peer", "iperf3", {}, "two on one host", ("message",), STREAM_BYTES),
    LinkEntry("peer", "iperf3 -P 2", {}, "two on one host", ("message",), STREAM_BYTES),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured: `num_rounds` with new processes, `samples` of each row in a round."""

    num_rounds: int
    samples: SampleBudget
    num_scattered_pages: int
    least_pool_pages: int


THOROUGH: Final = Effort(3, SampleBudget(0.4, 5, 2000), 8192, 16_384)
QUICK: Final = Effort(1, SampleBudget(0.05, 3, 200), 1024, 2048)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is measured. Each round runs all entries."""

    entries: tuple[LinkEntry, ...]
    workloads: tuple[Workload, ...]
    effort: Effort

    @property
    def num_pool_pages(self) -> int:
        """Pages of either side's pool."""
        return plan_pool(self.workloads, self.effort.least_pool_pages)


def choose_transports(
    asked: Sequence[str], installed: Sequence[str], options: Mapping[str, Mapping[str, object]]
) -> tuple[LinkEntry, ...]:
    """The transports of the command line, or all that are installed.

    Raises:
        UnknownPluginError: one of the command line is not installed.
    """
    for kind in asked:
        if kind not in installed:
            raise UnknownPluginError("baton.transports", kind, tuple(installed))
    return tuple(
        LinkEntry("transport", kind, options.get(kind, {}))
        for kind in dict.fromkeys(asked or installed)
    )


def make_workloads(sizes: Sequence[int], effort: Effort) -> tuple[Workload, ...]:
    """A message of each size, scattered pages, and descriptors alone.

    Raises:
        ConfigError: these sizes need a larger pool than a node allocates.
    """
    num_pages = effort.num_scattered_pages
    messages = [Workload("message", size) for size in sorted(set(sizes))]
    workloads = (
        *messages,
        Workload("scattered", num_pages * PAGE_BYTES),
        Workload("descriptors", num_pages * TINY_PAGE_BYTES),
    )
    if plan_pool(workloads, effort.least_pool_pages) > MAX_POOL_PAGES:
        largest = format_size(MAX_POOL_PAGES * PAGE_BYTES // 2)
        raise ConfigError(f"--sizes: messages of more than {largest} cannot be measured")
    return workloads
