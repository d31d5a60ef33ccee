"""What Baton does inside the engine process of a vLLM server that it started.

vLLM calls this in each of its processes (entry point `vllm.general_plugins`). By itself an engine
lives on, with its memory, when its server is killed; a SIGTERM for the whole process group makes it
leave before the last tokens of running answers have reached the server; and what Baton's connector
logs in it is seen nowhere.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
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
    """In a child of a server of ours: end with it, hear no signal meant for it, log as it does."""
    parent = multiprocessing.parent_process()
    section = read_environment().get(SERVER_VARIABLE)
    if parent is None or section is None:
        return
    configure_logging(msgspec.json.decode(section, type=LogSection))
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before the kernel knew
        os._exit(1)
