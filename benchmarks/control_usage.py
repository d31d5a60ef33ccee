"""CPU time and context switches of processes, by thread, from /proc."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench_burst import read_threads

IDLE_NS = 100_000
"""A thread that took less during a load has not served it."""


@dataclass(frozen=True)
class Usage:
    """Of named processes and their descendants; keys are `process/thread` and the thread's id."""

    cpu_ns: dict[tuple[str, int], int]
    num_switches: dict[tuple[str, int], int]
    """Voluntary ones: the thread had to wait, for a socket, a lock or another thread."""

    @classmethod
    def read(cls, processes: dict[str, int]) -> Self:
        """So far; `processes` are ids by name."""
        cpu_ns, num_switches = {}, {}
        for process, pid in processes.items():
            for (owner, thread, name), ns in read_threads(pid).items():
                key = f"{process}/{f'main ({name})' if owner == thread else name}", thread
                cpu_ns[key] = ns
                num_switches[key] = _read_switches(owner, thread)
        return cls(cpu_ns, num_switches)

    def cpu_ms_since(self, before: Usage) -> Counter[str]:
        """CPU time since `before`; threads of one name are added up."""
        spent: Counter[str] = Counter()
        for key, ns in self.cpu_ns.items():
            taken_ns = ns - before.cpu_ns.get(key, 0)
            if taken_ns > IDLE_NS:
                spent[key[0]] += taken_ns / 1e6
        return spent

    def switches_since(self, before: Usage) -> Counter[str]:
        """Voluntary switches since `before`; threads of one name are added up."""
        counted: Counter[str] = Counter()
        for key, num in self.num_switches.items():
            counted[key[0]] += num - before.num_switches.get(key, 0)
        return counted


def sum_by_process(by_thread: Counter[str]) -> Counter[str]:
    """`process/thread` → `process`."""
    total: Counter[str] = Counter()
    for label, value in by_thread.items():
        total[label.partition("/")[0]] += value
    return total


def _read_switches(pid: int, thread: int) -> int:
    try:
        status = Path(f"/proc/{pid}/task/{thread}/status").read_text("utf-8", errors="replace")
    except OSError:
        return 0
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split(maxsplit=1)[0])
