"""What Baton does inside the engine process of a vLLM server that it started.

vLLM calls this in each of its processes (entry point `vllm.general_plugins`). By itself an engine
lives on, with its memory, when its server is killed; a SIGTERM for the whole process group makes it
leave before the last tokens of running answers have reached the server; and what Baton's connector
logs in it is seen nowhere. It also collects garbage before it exits, which takes seconds.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from baton.config.environment import read_environment
from baton.config.logs import configure_logging
from baton.config.sections import LogSection
from baton.net import parent_process

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVER_VARIABLE: Final = "BATON_VLLM_SERVER"
"""Set in servers that Baton starts, to their `LogSection` as JSON; others are left alone."""


def server_variables(section: LogSection, run_directory: Path) -> Mapping[str, str]:
    """What a server and its engine processes find in their environment.

    vLLM leaves the sockets between them behind; `run_directory` is removed as the server ends.
    """
    return {
        SERVER_VARIABLE: msgspec.json.encode(section).decode(),
        "VLLM_RPC_BASE_PATH": str(run_directory),
    }


def exit_with_parent() -> None:
    """In a child of Baton's server: exit with it, ignore its group's signals, log as it does."""
    parent = multiprocessing.parent_process()
    section = read_environment().get(SERVER_VARIABLE)
    if parent is None or parent.pid is None or section is None:
        return
    configure_logging(msgspec.json.decode(section, type=LogSection))
    os.setpgid(0, 0)
    parent_process.exit_with_parent(parent.pid)


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
