"""`baton` where it starts processes of its own, with their modules loaded (`tests.preloaded`).

A launcher is forked from a process that has them, and so has them, too: what it starts by
`python -m baton.…` is forked from it in turn. Each is a child in a session of its own, with the
pipes, descriptors, environment and arguments that it was to have; its name is its command's.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import uvloop

from baton.cli.main import main as baton
from tests.preloaded import forget_the_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

PYTHON: Final = [sys.executable, "-m"]
OURS: Final = "baton."
COMMANDS: Final = "baton.cli"
PR_SET_NAME: Final = 15

_libc = ctypes.CDLL(None)
_new_uvloop = uvloop.new_event_loop


class ForkingPopen(subprocess.Popen[bytes]):
    """Forks where a process of Baton is started; starts other programs."""

    def _execute_child(self, *given: Any) -> None:
        command, _, prepare, _, kept, folder, environment, *_ = given
        pipes = given[10:16]
        if list(command[:2]) != PYTHON or not command[2].startswith(OURS):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        assert folder is None
        has_own_session = given[21]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            streams = (pipes[0], pipes[3], pipes[5])
            if has_own_session:
                os.setsid()
            _become(command[2:], streams, kept, environment, prepare)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _become(
    words: Sequence[str],
    streams: tuple[int, ...],
    kept: Collection[int],
    environment: Mapping[str, str] | None,
    prepare: Callable[[], None] | None,
) -> NoReturn:
    """What exec would do, and then the command; never returns to what the launcher was doing."""
    status = 1
    try:
        gc.freeze()  # the launcher's objects own numbers of descriptors that are ours now
        if prepare is not None:
            prepare()
        for target, source in enumerate(streams):
            if source != -1:
                os.dup2(source, target)
        for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            if number > 2 and number not in kept:
                with suppress(OSError):
                    os.close(number)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asyncio._set_running_loop(None)
        asyncio.set_event_loop_policy(None)
        uvloop.new_event_loop = _new_uvloop
        atexit._clear()
        forget_the_tests()
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for its life
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", closefd=False)  # noqa: SIM115
        module, *sys.argv[1:] = words
        _libc.prctl(PR_SET_NAME, words[module == COMMANDS].encode())
        if module == COMMANDS:
            sys.argv[0] = "baton"
            baton()
        sys.modules.pop(module, None)  # it runs as `__main__`
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001 - as at the end of any process
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Run `baton`, as `PreloadedProcess` wants it."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    uvloop.new_event_loop = asyncio.new_event_loop  # uvloop starts processes without it
    baton()


if __name__ == "__main__":
    main()
