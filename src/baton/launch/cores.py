"""How the machine's cores are shared between workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint, equal runs of cores for each worker; overlapping single ones if they are few."""
    size = max(1, len(cores) // num_workers)
    return [
        tuple(cores[(worker * size + i) % len(cores)] for i in range(size))
        for worker in range(num_workers)
    ]
