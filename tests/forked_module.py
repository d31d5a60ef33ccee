"""`python -m MODULE ARGUMENTS`, forked from a process that has the module's imports loaded.

Hundreds of small processes are started: Mooncake's, peers that are killed or stopped, commands.
What they do takes milliseconds, and to start Python and import what they need, a third of a second
of processor time and more.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from tests.preloaded import TORCH, Inherited, forget_the_tests

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOADED: Final = (
    "baton.cli.bench_serve",
    "baton.cli.doctor",
    "baton.cli.store",
    "baton.ops.store",
    "baton.testing.transport_peer",
    "baton.transfer.transports.file",
    "baton.transfer.transports.mooncake.child",
    TORCH,  # other tests of this process may fork workers from it
)


class ForkingSubprocess:
    """In the place of the module `subprocess`, where one starts Python modules with it."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    @staticmethod
    def ensure_running() -> None:
        """Start the process that the others are forked from, unless this one has it."""
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
            case [sys.executable, "-m", *words]:
                ForkingSubprocess.ensure_running()
                return ForkedModule(words, (stdin, stdout, stderr), env)
            case _:
                return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)


def run_forked(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `python -m …` to its end; as `subprocess.run` with `capture_output` and `text`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = {"stdout": out.fileno(), "stderr": err.fileno()}
        process = ForkingSubprocess.Popen(command, subprocess.DEVNULL, **files, env=env)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(list(command), status, *printed)


class ForkedModule:
    """What is used of a `subprocess.Popen[bytes]`."""

    def __init__(
        self, words: Sequence[str], streams: tuple[int | None, ...], env: Mapping[str, str] | None
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        inherited, opened = [], []
        for number, stream in enumerate(streams):
            theirs = number if stream is None else stream
            if stream == subprocess.DEVNULL:
                theirs = os.open(os.devnull, os.O_RDWR)
                opened.append(theirs)
            elif stream == subprocess.PIPE:
                read, write = os.pipe()
                if number == 0:
                    theirs, self.stdin = read, os.fdopen(write, "wb")
                else:
                    theirs, self.stdout = write, os.fdopen(read, "rb")
                opened.append(theirs)
            inherited.append(Inherited(theirs))
        environment = dict(os.environ if env is None else env)
        self._process = get_context("forkserver").Process(
            target=_run, args=(list(words), environment, str(Path.cwd()), *inherited), daemon=True
        )
        try:
            self._process.start()
        finally:
            for fd in opened:
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


def _run(words: list[str], environment: dict[str, str], folder: str, *streams: int) -> None:
    os.chdir(folder)
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for this process' life
    os.environ.clear()
    os.environ.update(environment)
    forget_the_tests()
    module, *sys.argv[1:] = words
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it runs as `__main__`
    runpy.run_module(module, run_name="__main__", alter_sys=True)
