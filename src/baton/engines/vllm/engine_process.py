"""What Baton does inside the engine process of a vLLM server that it started.

vLLM calls this in each of its processes (entry point `vllm.general_plugins`). By itself an engine
lives on, with its memory, when its server is killed; a SIGTERM for the whole process group makes it
leave before the last tokens of running answers have reached the server; and what Baton's connector
logs in it is seen nowhere. It also collects garbage before it exits, which takes seconds.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from baton.config.environment import read_environment
from baton.config.logs import configure_logging
from baton.config.sections import LogSection

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVER_VARIABLE: Final = "BATON_VLLM_SERVER"
"""Set in servers that Baton starts, to their `LogSection` as JSON; others are left alone."""
PR_SET_PDEATHSIG: Final = 1


def server_variables(section: LogSection) -> Mapping[str, str]:
    """What a server's engine processes find in their environment."""
    return {SERVER_VARIABLE: msgspec.json.encode(section).decode()}


def exit_with_parent() -> None:
    """In a child of Baton's server: exit with it, ignore its group's signals, log as it does."""
    parent = multiprocessing.parent_process()
    section = read_environment().get(SERVER_VARIABLE)
    if parent is None or section is None:
        return
    configure_logging(msgspec.json.decode(section, type=LogSection))
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before the kernel knew
        os._exit(1)


def exit_at_end() -> None:
    """In the engine process of Baton's server, at the end of an orderly shutdown: exit, code 0.

    Called when the executor, its workers and the publisher of KV events have ended. After that
    vLLM collects garbage, as in a process that lives on: seconds on a busy machine, after which its
    server would kill it. After an error it returns, and vLLM goes on as it does without Baton.
    """
    if multiprocessing.parent_process() is None or SERVER_VARIABLE not in read_environment():
        return
    match sys.exception():
        case SystemExit(code=None | 0):
            logging.shutdown()
            os._exit(0)
        case _:
            pass
