"""Versions of what runs here: Python, packages, kernel, GPUs."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import distributions
from typing import TYPE_CHECKING

import msgspec

from baton import __version__
from baton.ops.doctor.devices import QUERY

if TYPE_CHECKING:
    from baton.ops.doctor.host import Host


class HostVersions(msgspec.Struct, frozen=True, kw_only=True):
    """`versions.json`. `gpus`: lines of nvidia-smi; None without that program."""

    baton: str
    python: str
    implementation: str
    kernel: str
    machine: str
    system: str
    num_cpus: int
    gpus: tuple[str, ...] | None
    packages: dict[str, str]


def read_versions(host: Host) -> HostVersions:
    """Look at this machine; runs nvidia-smi if there is one.

    Raises:
        subprocess.TimeoutExpired: nvidia-smi did not end.
    """
    answer = host.run_program(QUERY)
    installed = {found.name: found.version for found in distributions() if found.name}
    return HostVersions(
        baton=__version__,
        python=sys.version.replace("\n", " "),
        implementation=platform.python_implementation(),
        kernel=f"{platform.release()} {platform.version()}",
        machine=platform.machine(),
        system=_read_system(host),
        num_cpus=len(host.cpus),
        gpus=None if answer is None else tuple(answer.text.splitlines()),
        packages=dict(sorted(installed.items(), key=lambda each: each[0].lower())),
    )


def _read_system(host: Host) -> str:
    for line in (host.read("/etc/os-release") or "").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip('"')
    return platform.system()
