"""`baton` and vLLM processes that begin with their modules loaded: forked from one that has them.

To import torch, transformers and Baton takes seconds of processor time, and vLLM 12 s in each of
the three processes of a server; the tests start tens of them. From its command line on, such a
process is as any other: a session, a log and an exit status of its own, ended by the same signals.
What differs: vLLM forks its engine and its worker, as it does by default where there are GPUs, but
where TESTS_START_METHOD=spawn says otherwise; these wait for each other without spinning, and end
without a search for garbage; and it compiles nothing with torch. Tests of
tests/integration/test_vllm_worker.py and test_up_demo.py start workers by their command.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from baton.testing.network_namespaces import move_thread_into

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


TORCH: Final = "tests.preloaded_modules"
VLLM: Final = "tests.preloaded_vllm"
VLLM_MAIN: Final = "vllm.entrypoints.launchers.api_server.entry"


def start_preloaded(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stderr: IO[bytes],
    namespace: str | None = None,
) -> PreloadedProcess:
    """Start `baton` with these arguments, torch loaded; in a network namespace, if one is named."""
    given = (arguments, environment, stderr)
    return PreloadedProcess(TORCH, "baton.cli.main", *given, namespace=namespace)


def start_preloaded_vllm(
    arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
) -> PreloadedProcess:
    """Start `baton` with these arguments, vLLM loaded."""
    return PreloadedProcess(VLLM, "baton.cli.main", arguments, environment, stderr)


def start_plain_vllm(
    arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
) -> PreloadedProcess:
    """Start vLLM's own server with these arguments, vLLM loaded."""
    return PreloadedProcess(VLLM, VLLM_MAIN, arguments, environment, stderr)


def wait_until_loaded(loaded: str = TORCH) -> None:
    """So that the time limit of a test is none of what takes several seconds once."""
    context = get_context("forkserver")
    context.set_forkserver_preload([loaded])
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    first.close()


class PreloadedProcess:
    """Runs `main` of a module; see `baton.testing.fleet.Child`.

    All of one test process are forked from the same one, which has loaded what the first wanted:
    `loaded`, a module that imports it. It has the descriptors `inherited`, and gets their numbers
    behind its arguments.
    """

    def __init__(
        self,
        loaded: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stderr: IO[bytes],
        namespace: str | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([loaded])
        read, write = os.pipe()
        given = (module, list(arguments), dict(environment), str(Path.cwd()), namespace)
        self._process = context.Process(
            target=_run,
            args=(*given, Inherited(write), Inherited(stderr.fileno()), *map(Inherited, inherited)),
            daemon=True,
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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("baton", timeout or 0.0)
        return status


@dataclass(frozen=True)
class Inherited:
    """A file descriptor that the new process gets; there, its number."""

    number: int

    def __reduce__(self) -> tuple[Callable[[DupFd], int], tuple[DupFd]]:
        return _detach, (DupFd(self.number),)


def _detach(inherited: DupFd) -> int:
    return inherited.detach()


def _run(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    namespace: str | None,
    stdout: int,
    stderr: int,
    *inherited: int,
) -> None:
    os.setsid()
    os.chdir(folder)
    if namespace is not None:
        move_thread_into(namespace)
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place and place not in sys.path]
    sys.argv = [module, *arguments, *map(str, inherited)]
    forget_the_tests()
    import_module(module).main()


def forget_the_tests() -> None:
    """As for a process that a command began: it may have children, and is nobody's."""
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.process._parent_process = None
    resource_tracker._resource_tracker = tracker = resource_tracker.ResourceTracker()
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(tracker, name))
