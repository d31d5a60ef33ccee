"""The file that keeps what a benchmark found, with the circumstances of the run."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING

from baton.config.bfloat16 import computes_bfloat16
from baton.rig.machine import CPU_INFO, describe_machine

if TYPE_CHECKING:
    from pathlib import Path

LOAD_BEFORE = os.getloadavg()[0]


def write_record(path: Path | None, **parts: object) -> None:
    """Write command, machine, load before and after, and `parts`, as JSON; no `path`: nothing."""
    if path is None:
        return
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "cpu": describe_machine().cpu,
        # Virtual processors of one name may differ by ten times in what models take.
        "computes_bfloat16": computes_bfloat16(CPU_INFO.read_text("utf-8", "replace")),
        "load_before": LOAD_BEFORE,
        "load_after": os.getloadavg()[0],
        **parts,
    }
    path.write_text(json.dumps(record, indent=1, default=_to_json) + "\n", "utf-8")


def _to_json(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be kept")
