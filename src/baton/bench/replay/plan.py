"""What is replayed: the load, the fleet, the policies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.auth.ticket import WorkerRef
from baton.errors import ConfigError
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.fleet import WorkerView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.bench.workloads.requests import Workload
    from baton.router.modes import ModeSetting
    from baton.sim.router.costs import SimulatedCosts

MODEL: Final = "simulated"
MAX_WORKERS: Final = 1024
MAX_GATEWAYS: Final = 64
DEFAULT_WORKERS: Final = 4
_SPLIT: Final = re.compile(r"(\d{1,4})p(\d{1,4})d")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Sessions begin at the times in the trace."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Sessions begin independently of each other, so many a second on the average."""

    per_s: float


@dataclass(frozen=True, slots=True)
class Clients:
    """So many clients, each with one session after another."""

    num: int


Arrivals: TypeAlias = Recorded | Rate | Clients


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy by its name, and its options."""

    name: str
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """`num_requests` None: all of the workload. Clients use `num_gateways` gateways in turns.

    So do recorded sessions. A request within `ttft_s` and `tpot_s` is good, if it keeps its target
    for gaps, too: `itl_s`; None: it has none.
    """

    workload: Workload
    arrivals: Arrivals
    num_requests: int | None
    workers: tuple[WorkerView, ...]
    num_gateways: int
    policies: tuple[PolicyChoice, ...]
    mode: ModeSetting
    costs: SimulatedCosts
    ttft_s: float
    tpot_s: float
    itl_s: float | None
    seed: int


def make_workers(roles: str, num_workers: int | None) -> tuple[WorkerView, ...]:
    """A fleet: `both`, or so many for each part as in `2p2d`.

    Raises:
        ConfigError: it is no such text, or does not agree with the number.
    """
    if roles == "both":
        num = DEFAULT_WORKERS if num_workers is None else num_workers
        _check(num)
        return tuple(_view(f"worker-{n}", Role.BOTH) for n in range(num))
    found = _SPLIT.fullmatch(roles)
    if found is None:
        raise ConfigError(f"--roles {roles!r}: both, or prefill and decode workers such as 2p2d")
    num_prefill, num_decode = int(found[1]), int(found[2])
    _check(num_prefill + num_decode)
    if num_workers not in {None, num_prefill + num_decode}:
        raise ConfigError(f"--roles {roles} are not --workers {num_workers}")
    if not num_decode:
        raise ConfigError(f"--roles {roles}: no worker could answer")
    return (
        *(_view(f"prefill-{n}", Role.PREFILL) for n in range(num_prefill)),
        *(_view(f"decode-{n}", Role.DECODE) for n in range(num_decode)),
    )


def check_gateways(num_gateways: int) -> int:
    """The number itself.

    Raises:
        ConfigError: it is out of bounds.
    """
    if not 1 <= num_gateways <= MAX_GATEWAYS:
        raise ConfigError(f"--gateways: {num_gateways} is not in [1, {MAX_GATEWAYS}]")
    return num_gateways


def _check(num_workers: int) -> None:
    if not 1 <= num_workers <= MAX_WORKERS:
        raise ConfigError(f"--workers: {num_workers} is not in [1, {MAX_WORKERS}]")


def _view(name: str, role: Role) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    return WorkerView(ref, role, MODEL, MODEL, frozenset({"tcp"}), available=True)
