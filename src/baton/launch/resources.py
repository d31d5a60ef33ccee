"""Whether this machine has room for a second process like one that runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from baton.launch.child import list_session

DEVICE_FILES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
KIB: Final = 1024
MEMORY_MARGIN: Final = 1.1


def has_room_for_another(session: int) -> bool:
    """Whether a second process with the memory of this one, and its children, fits beside it.

    One that holds an accelerator is taken to use most of its memory.
    """
    return not holds_device(session) and count_memory(session) * MEMORY_MARGIN <= free_memory()


def count_memory(session: int) -> int:
    """Bytes of memory that a process and its children hold, with their share of what is shared."""
    total = 0
    for pid in list_session(session):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * KIB
    return total


def free_memory() -> int:
    """Bytes that new processes can have without swapping; 0 where that is not known."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    return 0


def holds_device(session: int) -> bool:
    """Whether a process or one of its children has an accelerator open."""
    for pid in list_session(session):
        with suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(fd.readlink()).startswith(DEVICE_FILES):
                        return True
    return False
