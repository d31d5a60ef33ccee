"""`baton` processes that begin with torch loaded: forked from one process that has imported it.

To import torch and transformers takes seconds of processor time, and the tests start tens of
workers. From its command line on, such a process is as any other: a session, a log and an exit
status of its own, ended by the same signals. tests/integration/test_worker_process.py and
test_up_demo.py start workers by their command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.context import ForkServerContext


@lru_cache(maxsize=1)
def _forkserver() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded_modules"])
    return context


def start_preloaded(
    arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
) -> PreloadedProcess:
    """Start `baton` with these arguments."""
    return PreloadedProcess(arguments, environment, stderr)


class PreloadedProcess:
    """See `baton.testing.fleet.Child`."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
    ) -> None:
        read, write = os.pipe()
        given = (list(arguments), dict(environment), str(Path.cwd()))
        self._process = _forkserver().Process(
            target=_run, args=(*given, _Inherited(write), _Inherited(stderr.fileno())), daemon=True
        )
        try:
            self._process.start()
        finally:
            os.close(write)
        self.stdout: IO[bytes] | None = os.fdopen(read, "rb", buffering=0)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("baton", timeout or 0.0)
        return status


@dataclass(frozen=True)
class _Inherited:
    """A file descriptor that the new process gets; there, its number."""

    number: int

    def __reduce__(self) -> tuple[Callable[[DupFd], int], tuple[DupFd]]:
        return _detach, (DupFd(self.number),)


def _detach(inherited: DupFd) -> int:
    return inherited.detach()


def _run(
    arguments: list[str], environment: dict[str, str], folder: str, stdout: int, stderr: int
) -> None:
    os.setsid()
    os.chdir(folder)
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["baton", *arguments]
    from baton.cli.main import run  # noqa: PLC0415 - in the new process

    sys.exit(run(arguments))
