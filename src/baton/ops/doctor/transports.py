"""Each installed transport: does it work on this host, and if not, why and what helps."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.clock import MachineClock
from baton.ops.doctor.finding import Area, Finding, Level, write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.ops.doctor.host import Host
    from baton.ops.doctor.transport_check import TransferCheckResult

PATH_NAME: Final = "handoff path"
ON_CPU: Final[Mapping[str, str]] = {
    "nixl": "--no-deps nixl-cu12",
    "nixl_cu12": "--no-deps nixl-cu12",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "torch": "torch",
}
ON_GPU: Final[Mapping[str, str]] = {
    **ON_CPU,
    "nixl": "nixl",
    "nixl_cu12": "nixl",
    "mooncake": "mooncake-transfer-engine",
}
"""Python's name of a library that a transport imports → what pip is asked for."""
SYSTEM_PACKAGES: Final[Mapping[str, str]] = {
    "libibverbs.so.1": "libibverbs1 libnuma1",
    "libnuma.so.1": "libnuma1",
}
"""A shared library that a Python package expects of the system → Debian's packages."""

WITHIN_ONE_PROCESS: Final = frozenset({"local"})
"""Transports whose two sides are one process: nothing between two is to be tried."""

_MISSING_OPTION: Final = re.compile(r"missing required field `(\w+)`")
_MISSING_MODULE: Final = re.compile(r"No module named '([\w.]+)'")
_MISSING_LIBRARY: Final = re.compile(r"(lib[\w+-]+\.so[.\d]*): cannot open shared object file")


@dataclass(frozen=True, slots=True)
class ChosenTransports:
    """From the configuration: the transports to use, best first, and each one's options."""

    kinds: tuple[str, ...]
    options: Mapping[str, Mapping[str, object]]


def check_transport(kind: str, chosen: ChosenTransports, host: Host) -> list[Finding]:
    """Move pages by one transport between two processes."""
    from baton.ops.doctor.transport_check import run_transport_check  # noqa: PLC0415 - numpy
    from baton.rig.pages import UnsupportedError  # noqa: PLC0415

    if kind in WITHIN_ONE_PROCESS:
        return [_not_tried(kind, "it is for one process that computes prefill and decode")]
    try:
        moved = run_transport_check(kind, chosen.options.get(kind, {}), MachineClock())
    except UnsupportedError as exc:
        return [_not_tried(kind, str(exc))]
    except Exception as exc:  # noqa: BLE001 - a plug-in may raise anything: that is the finding
        option = _MISSING_OPTION.search(str(exc))
        if option is not None and kind not in chosen.kinds:
            return [_not_set_up(kind, option[1])]
        return [_failed(kind, chosen, host, exc)]
    return [_worked(kind, moved), *_unasked_listeners(kind, moved)]


def check_path(findings: Sequence[Finding], chosen: ChosenTransports) -> Finding:
    """By which transport two workers on this host will hand over. Pure."""
    working = {
        finding.name
        for finding in findings
        if finding.area is Area.TRANSPORTS and finding.level is Level.OK
    }
    best = next((kind for kind in chosen.kinds if kind in working), None)
    listed = ", ".join(chosen.kinds)
    if best is None:
        return Finding(
            area=Area.TRANSPORTS,
            name=PATH_NAME,
            level=Level.PROBLEM,
            found=f"none of the configured transports works here: {listed}",
            why="Every request would be computed by the decode worker alone.",
        )
    if best == chosen.kinds[0]:
        return Finding(
            area=Area.TRANSPORTS,
            name=PATH_NAME,
            level=Level.OK,
            found=f"two workers on this host use {best} (configured: {listed})",
            why="The first of the configured transports that works.",
        )
    return Finding(
        area=Area.TRANSPORTS,
        name=PATH_NAME,
        level=Level.WARNING,
        found=f"two workers on this host fall back to {best} (configured: {listed})",
        why="Handoffs work, by a slower way than the one that was asked for.",
    )


def failure_level(kind: str, chosen: ChosenTransports) -> Level:
    """How bad it is that a transport does not work."""
    return Level.WARNING if kind in chosen.kinds else Level.NOTE


def _worked(kind: str, moved: TransferCheckResult) -> Finding:
    verbs = "written and read back" if moved.was_read else "written"
    return Finding(
        area=Area.TRANSPORTS,
        name=kind,
        level=Level.OK,
        found=f"works: {write_bytes(moved.num_bytes)} of scattered pages {verbs} between two "
        "processes, every byte verified",
        why="Tried for real; how fast it is, `baton bench link` measures.",
    )


def _unasked_listeners(kind: str, moved: TransferCheckResult) -> list[Finding]:
    if not moved.listeners:
        return []
    return [
        Finding(
            area=Area.TRANSPORTS,
            name=f"{kind} listens",
            level=Level.WARNING,
            found=f"it was given 127.0.0.1 and listened on {', '.join(moved.listeners)}",
            why="Its library opens a port that anybody who reaches this host may connect to.",
        )
    ]


def _not_set_up(kind: str, option: str) -> Finding:
    name = f"transfer.options.{kind}.{option}"
    return Finding(
        area=Area.TRANSPORTS,
        name=kind,
        level=Level.NOTE,
        found=f"not tried: it is not configured, and needs the option {name}",
        why=f"Whoever wants it sets that; to try it: `baton doctor --set {name}=...`.",
    )


def _not_tried(kind: str, reason: str) -> Finding:
    return Finding(
        area=Area.TRANSPORTS,
        name=kind,
        level=Level.NOTE,
        found=f"not tried: {reason}",
        why="The doctor tries what moves host memory between two processes; no more is known.",
    )


def _failed(kind: str, chosen: ChosenTransports, host: Host, error: Exception) -> Finding:
    is_chosen = kind in chosen.kinds
    reason, fix = _explain(host, error)
    return Finding(
        area=Area.TRANSPORTS,
        name=kind,
        level=failure_level(kind, chosen),
        found=f"does not work: {reason}",
        why="It is configured (transfer.transports): a worker that cannot build it does not start; "
        "one that reaches no peer by it takes the next one."
        if is_chosen
        else "It is installed and not configured: only those who want it need it.",
        fix=fix,
    )


def _explain(host: Host, error: Exception) -> tuple[str, str | None]:
    """Why a transport does not work, and the command that helps."""
    from baton.rig.node import describe_error  # noqa: PLC0415 - numpy

    reason = describe_error(error)
    if module := _MISSING_MODULE.search(reason):
        packages = ON_GPU if host.exists("/proc/driver/nvidia") else ON_CPU
        package = packages.get(module[1].partition(".")[0])
        fix = None if package is None else f"{sys.executable} -m pip install {package}"
        return f"the Python package {module[1]} is not installed", fix
    if library := _MISSING_LIBRARY.search(reason):
        debian = SYSTEM_PACKAGES.get(library[1])
        fix = None if debian is None else f"sudo apt-get install {debian}"
        return f"the system lacks {library[1]}, which its library needs", fix
    return reason, None
