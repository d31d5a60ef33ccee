"""Where probes look: files below a root, programs, packages, and the room in a file system."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.config.environment import read_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_FILE_BYTES: Final = 1 << 20
PROGRAM_TIMEOUT_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class Space:
    """Room in one file system."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """What a program wrote (both streams), and how it ended."""

    returncode: int
    text: str


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or a recorded tree of one.

    `ask` runs a program and returns its answer, None if there is no such program. `measure_space`
    and `find_version` return None where there is no such file system or package. `cpus` are the
    processors that this process may use.
    """

    root: Path
    environment: Mapping[str, str]
    cpus: frozenset[int]
    run_program: Callable[[tuple[str, ...]], ProgramOutput | None]
    measure_space: Callable[[str], Space | None]
    find_version: Callable[[str], str | None]

    def read(self, path: str) -> str | None:
        """A small file's text, stripped; None if it is not there or does not want to be read."""
        try:
            with self._at(path).open("rb") as file:
                return file.read(MAX_FILE_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def read_number(self, path: str) -> int | None:
        """A file that holds one integer; None if it does not."""
        try:
            return int(self.read(path) or "")
        except ValueError:
            return None

    def entries(self, path: str) -> tuple[str, ...]:
        """Names in a directory, sorted; none if there is no such directory."""
        try:
            return tuple(sorted(entry.name for entry in self._at(path).iterdir()))
        except OSError:
            return ()

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory."""
        return self._at(path).exists()

    def is_usable(self, path: str) -> bool:
        """Whether this user may read and write it."""
        return os.access(self._at(path), os.R_OK | os.W_OK)

    def target(self, path: str) -> str | None:
        """The target of a symbolic link; None if there is none."""
        try:
            return str(self._at(path).readlink())
        except OSError:
            return None

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def this_host() -> Host:
    """The machine that this process runs on."""
    return Host(
        root=Path("/"),
        environment=read_environment(),
        cpus=_usable_cpus(),
        run_program=run_program,
        measure_space=_measure_space,
        find_version=_find_version,
    )


def run_program(command: tuple[str, ...]) -> ProgramOutput | None:
    """Run a program; None if it is not installed.

    Raises:
        subprocess.TimeoutExpired: it did not end in time; it was killed.
    """
    try:
        done = subprocess.run(  # noqa: S603 - fixed command lines of our own
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, PermissionError):
        return None
    return ProgramOutput(done.returncode, done.stdout.decode(errors="replace").strip())


def _usable_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _measure_space(path: str) -> Space | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
