"""`python -m MODULE`, forked from a process that has the module's imports loaded.

The contract suites start hundreds of small processes: Mooncake's, and peers that are killed or
stopped. What they do takes milliseconds, and to start Python and import what they need, a third of
a second of processor time.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from multiprocessing import forkserver, get_context
from typing import IO, TYPE_CHECKING, Final

from tests.preloaded import Inherited, forget_the_tests

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOADED: Final = (
    "baton.testing.transport_peer",
    "baton.transfer.transports.file",
    "baton.transfer.transports.mooncake.child",
    "baton.transfer.transports.shared",
    "baton.transfer.transports.tcp",
)


class ForkingSubprocess:
    """In the place of the module `subprocess`, where one starts Python modules with it."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    @staticmethod
    def ensure_running() -> None:
        """Start the process that the others are forked from, once."""
        get_context("forkserver").set_forkserver_preload(list(LOADED))
        forkserver.ensure_running()

    @staticmethod
    def Popen(  # noqa: N802 - as in `subprocess`
        command: Sequence[str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ForkedModule | subprocess.Popen[bytes]:
        """A module of this same Python is forked; another program is started."""
        match command:
            case [sys.executable, "-m", str(module)]:
                return ForkedModule(module, (stdin, stdout, stderr), env)
            case _:
                return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)


class ForkedModule:
    """What is used of a `subprocess.Popen[bytes]`."""

    def __init__(
        self, module: str, streams: tuple[int | None, ...], env: Mapping[str, str] | None
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        inherited, ours_too = [], []
        for number, stream in enumerate(streams):
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                theirs = read if number == 0 else write
                if number == 0:
                    self.stdin = os.fdopen(write, "wb")
                else:
                    self.stdout = os.fdopen(read, "rb")
                ours_too.append(theirs)
            elif stream == subprocess.DEVNULL:
                theirs = os.open(os.devnull, os.O_RDWR)
                ours_too.append(theirs)
            else:
                theirs = number if stream is None else stream
            inherited.append(Inherited(theirs))
        environment = dict(os.environ if env is None else env)
        self._process = get_context("forkserver").Process(
            target=_run, args=(module, environment, *inherited), daemon=True
        )
        try:
            self._process.start()
        finally:
            for fd in ours_too:
                os.close(fd)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, minus the signal that ended it, once it has ended."""
        if self.returncode is None:
            self.returncode = self._process.exitcode
            if self.returncode is not None:
                self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a forked module", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()


def _run(module: str, environment: dict[str, str], *streams: int) -> None:
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for this process' life
    os.environ.clear()
    os.environ.update(environment)
    forget_the_tests()
    sys.modules.pop(module, None)  # it runs as `__main__`
    runpy.run_module(module, run_name="__main__", alter_sys=True)
