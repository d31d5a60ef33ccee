"""How the workers of one role are divided between its StatefulSets: of pools, and of their racks.

No I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.launch.kubernetes.objects import Workload


def divide(present: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` workers on the sets of `present`, of which none shrinks while another one grows.

    The smallest set grows first, the largest shrinks first; of equal ones the first, or last, by
    name.
    """
    sizes = dict(sorted(present.items()))
    while (missing := total - sum(sizes.values())) and sizes:
        if missing > 0:
            sizes[min(sizes, key=lambda name: (sizes[name], name))] += 1
        else:
            sizes[max(sizes, key=lambda name: (sizes[name], name))] -= 1
    return sizes


def pod_names(workload: Workload, first: int, end: int) -> list[str]:
    """Of a StatefulSet's pods: those with the numbers `[first, end)`."""
    return [f"{workload.name}-{number}" for number in range(first, end)]


def find_without_identity(workload: Workload, names: list[str]) -> list[str]:
    """The pods for which the StatefulSet mounts no identity, where it mounts one for each pod."""
    paths = {
        item.path
        for volume in workload.spec.template.spec.volumes
        if volume.name == "identity" and volume.secret is not None
        for item in volume.secret.items
    }
    if not paths:
        return []
    return [name for name in names if f"{name}/tls.crt" not in paths]
