"""What the machine says of a server and all the processes that it started."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.chaos.process_state import read_own_inodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.testing.fleet import FleetProcess

LISTEN = "0A"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def find_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(word) for children in lists for word in children.read_text("ascii").split()]
    return [pid, *(below for child in children for below in find_tree(child))]


def read_cpu_s(server: FleetProcess) -> float:
    """Seconds of one core that a server has used so far, in all its processes."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for pid in find_tree(server.pid))
    words = (stat.rpartition(")")[2].split() for stat in stats)
    return sum(int(word[11]) + int(word[12]) for word in words) / TICKS_PER_S


def measure_cores(server: FleetProcess, seconds: float) -> float:
    """How many cores a server keeps busy from now on."""
    before, begun = read_cpu_s(server), time.monotonic()
    time.sleep(seconds)
    return (read_cpu_s(server) - before) / (time.monotonic() - begun)


def read_listening_addresses(server: FleetProcess) -> set[str]:
    """Addresses, as `/proc/net` writes them, on which a server listens for TCP."""
    own = {inode for pid in find_tree(server.pid) for inode in read_own_inodes(pid)}
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{server.pid}/net/{table}").read_text().splitlines()[1:]
        sockets = (line.split() for line in lines)
        found |= {s[1].partition(":")[0] for s in sockets if s[3] == LISTEN and s[9] in own}
    return found


def read_thread_cores(server: FleetProcess) -> set[str]:
    """Lists of cores on which a server's threads may run."""
    lines = (
        line
        for pid in find_tree(server.pid)
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
    )
    return {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")}


@contextmanager
def frozen_engine(server: FleetProcess) -> Iterator[None]:
    """A server whose engine is stopped, while its HTTP server goes on."""
    engines = find_tree(server.pid)[1:]
    assert engines
    signal_all(engines, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(engines, signal.SIGCONT)


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # the test has killed it
            os.kill(pid, number)


class SharedMemoryFiles:
    """The KV memory of a server's engine, as its own user may open it."""

    def __init__(self, server: FleetProcess, num_bytes: int) -> None:
        links = (
            link for pid in find_tree(server.pid) for link in Path(f"/proc/{pid}/fd").iterdir()
        )
        fitting = {
            (link.stat().st_ino): link
            for link in links
            if "memfd:" in str(link.readlink()) and link.stat().st_size >= num_bytes
        }
        assert fitting, "no memory file is as large as the pool"
        self._files = [link.open("r+b", buffering=0) for link in fitting.values()]
        self._before = [self._read(i) for i in range(len(self._files))]

    def flip_a_bit_of_what_is_new(self) -> tuple[int, int]:
        """Flip one bit of the KV that was written since the pool was opened: where it lies."""
        for number, before in enumerate(self._before):
            written = np.flatnonzero(self._read(number) != before)
            if len(written):
                place = int(written[len(written) // 2])
                self.flip(number, place)
                return number, place
        raise AssertionError("nothing was written")

    def flip(self, number: int, place: int) -> None:
        file = self._files[number]
        byte = os.pread(file.fileno(), 1, place)[0]
        assert os.pwrite(file.fileno(), bytes([byte ^ 0x40]), place) == 1

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _read(self, number: int) -> NDArray[np.uint8]:
        descriptor = self._files[number].fileno()
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return np.frombuffer(data, np.uint8)
