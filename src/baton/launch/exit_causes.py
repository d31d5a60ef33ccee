"""What an exit code and last log lines probably mean."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CAUSES: Final = (
    ("Address already in use", "another process listens on the port; choose one with --port"),
    ("No module named", "a dependency is missing; run `make up`, which installs what is needed"),
    ("out of memory", "not enough memory; set engine.kv_cache_bytes or engine.num_blocks lower"),
    ("MemoryError", "not enough memory; set engine.kv_cache_bytes or engine.num_blocks lower"),
    ("can't allocate memory", "not enough memory; set engine.kv_cache_bytes lower"),
    ("Permission denied", "a file or port may not be opened by this user"),
    ("No space left on device", "a disk or memory file system is full"),
)


def describe_exit(returncode: int) -> str:
    """How a process ended, in words. Negative codes are signals, as `subprocess` has it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def likely_cause(returncode: int, last_lines: Sequence[str]) -> str:
    """A guess for the person at the terminal; never empty."""
    for line in reversed(last_lines):
        for sign, cause in CAUSES:
            if sign in line:
                return cause
    match -returncode:
        case signal.SIGKILL:
            return "something killed it, often the kernel for want of memory: see `dmesg`"
        case signal.SIGSEGV | signal.SIGBUS | signal.SIGILL | signal.SIGABRT:
            return "a crash in native code, often a broken or mismatched wheel"
        case -2:
            return "its configuration was refused: see its last lines"
        case _:
            return "see its last lines; --debug shows more"
