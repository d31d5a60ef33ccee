"""The file that keeps what a benchmark found, with the circumstances of the run."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING

from baton.rig.machine import CPU_INFO

if TYPE_CHECKING:
    from pathlib import Path

LOAD_BEFORE = os.getloadavg()[0]
VECTOR_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "avx")
"""The first one that a processor has says how quickly models are computed."""


def write_record(path: Path | None, **parts: object) -> None:
    """Write command, machine, load before and after, and `parts`, as JSON; no `path`: nothing."""
    if path is None:
        return
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "cpu": _find_cpu(),
        "load_before": LOAD_BEFORE,
        "load_after": os.getloadavg()[0],
        **parts,
    }
    path.write_text(json.dumps(record, indent=1, default=_to_json) + "\n", "utf-8")


def _find_cpu() -> dict[str, str]:
    """The first processor in /proc/cpuinfo: two machines of one name may differ by ten times."""
    wanted = ("model name", "cpu family", "model")
    lines = CPU_INFO.read_text("utf-8", "replace").partition("\n\n")[0].splitlines()
    found = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    features = set(found.get("flags", "").split())
    most = next((name for name in VECTOR_FEATURES if name in features), "")
    return {name: found[name] for name in wanted if name in found} | {"vectors": most}


def _to_json(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be kept")
