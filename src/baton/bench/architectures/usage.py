"""CPU time of the servers, this client and the machine (/proc); energy of the machine.

RAPL and NVML count for the whole machine: energy is compared only between configurations that had
the machine to themselves.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

PROC: Final = Path("/proc")
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class CpuUse(msgspec.Struct, frozen=True):
    """CPU seconds between two readings.

    `others_share`: the share of all cores that other processes used (None: unknown). More than a
    few percent makes figures doubtful.
    """

    workers_s: dict[str, float]
    gateway_s: float
    client_s: float
    wall_s: float
    others_share: float | None

    @property
    def servers_s(self) -> float:
        """Of all servers, the gateway included."""
        return sum(self.workers_s.values()) + self.gateway_s


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds since the boot. `busy_s`: of all cores together."""

    at: float
    by_session: Mapping[int, float]
    client_s: float
    busy_s: float | None


def read_usage(sessions: Collection[int], now: float) -> Reading:
    """CPU time of every process in these sessions, reaped children included."""
    found = dict.fromkeys(sessions, 0.0)
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            session, cpu_s = _read_process(folder)
            if session in found:
                found[session] += cpu_s
    times = os.times()
    return Reading(now, found, times.user + times.system, _read_busy_s())


def compare_usage(
    before: Reading, after: Reading, names: Mapping[str, int], gateway: str
) -> CpuUse:
    """CPU time between two readings; `names` has each process's session."""
    spent = {
        name: max(0.0, after.by_session[pid] - before.by_session[pid])
        for name, pid in names.items()
        if pid in before.by_session and pid in after.by_session
    }
    client_s = after.client_s - before.client_s
    wall_s = max(after.at - before.at, 1e-9)
    others = None
    if before.busy_s is not None and after.busy_s is not None:
        ours = sum(spent.values()) + client_s
        num_cores = os.cpu_count() or 1
        others = max(0.0, (after.busy_s - before.busy_s - ours) / (wall_s * num_cores))
    gateway_s = spent.pop(gateway, 0.0)
    return CpuUse(spent, gateway_s, client_s, wall_s, others)


def read_session(folder: Path) -> int:
    """The session of a process, by its folder in /proc; 0 if it has ended."""
    return _read_process(folder)[0]


def _read_process(folder: Path) -> tuple[int, float]:
    """Session and CPU seconds; (0, 0.0) if the process has ended."""
    try:
        # The name, in parentheses, may hold anything.
        words = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(words[3]), sum(map(int, words[11:15])) / TICKS_PER_S
    except (OSError, ValueError, IndexError):
        return 0, 0.0


def _read_busy_s() -> float | None:
    """All but idle and I/O wait; time of a hypervisor counts as others'."""
    try:
        words = (PROC / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, words)
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


POWERCAP: Final = Path("/sys/class/powercap")
NVML_LIBRARY: Final = "libnvidia-ml.so.1"
UNMEASURED: Final = "energy is not measurable here: neither RAPL nor NVML can be read"


@dataclass(frozen=True, slots=True)
class Counter:
    """A rising counter in microjoules that wraps around at `wraps_at` (None: never)."""

    value: int
    wraps_at: int | None


class EnergyMeter:
    """Reads all counters. Building it loads NVML."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._powercap = powercap
        self._nvml = _load_nvml()

    def read(self) -> Mapping[str, Counter]:
        """All counters by source; empty where none can be read."""
        return {**dict(_read_rapl(self._powercap)), **dict(self._read_gpus())}

    def _read_gpus(self) -> Iterator[tuple[str, Counter]]:
        if self._nvml is None:
            return
        num = ctypes.c_uint()
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(num)):
            return
        for i in range(num.value):
            device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)):
                continue
            if not self._nvml.nvmlDeviceGetTotalEnergyConsumption(
                device, ctypes.byref(millijoules)
            ):
                yield f"gpu-{i}", Counter(millijoules.value * 1000, None)


def joules_between(before: Mapping[str, Counter], after: Mapping[str, Counter]) -> float | None:
    """Energy of all counters that both readings have; None without one."""
    known = before.keys() & after.keys()
    if not known:
        return None
    return sum(_rise(before[name], after[name]) for name in known) / 1e6


def _rise(before: Counter, after: Counter) -> int:
    """A counter may have wrapped around once."""
    if after.value >= before.value or after.wraps_at is None:
        return max(0, after.value - before.value)
    return after.value - before.value + after.wraps_at


def _read_rapl(folder: Path) -> Iterator[tuple[str, Counter]]:
    """Of whole packages: `intel-rapl:0`, not its parts (`intel-rapl:0:1`). AMD's are here too.

    Beside them some machines have the platform (`psys`), of which the packages are a part.
    """
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:
            continue
        # Since 2020 kernels let only root read it; some machines have none.
        with suppress(OSError, ValueError):
            if not (zone / "name").read_text(encoding="ascii").startswith("package"):
                continue
            value = int((zone / "energy_uj").read_text(encoding="ascii"))
            most = int((zone / "max_energy_range_uj").read_text(encoding="ascii"))
            yield zone.name, Counter(value, most)


def _load_nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
