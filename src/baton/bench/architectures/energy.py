"""Energy, where this machine lets it be read: RAPL of the processors, NVML of NVIDIA's GPUs.

Both count for the whole machine: the servers' share of it is not known, so it is compared only
between arms that had the machine to themselves.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

POWERCAP: Final = Path("/sys/class/powercap")
NVML_LIBRARY: Final = "libnvidia-ml.so.1"
UNMEASURED: Final = "energy is not measurable here: neither RAPL nor NVML can be read"


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter that only rises, and begins anew at `wraps_at` (None: never). Microjoules."""

    value: int
    wraps_at: int | None


class EnergyMeter:
    """Reads every counter that there is. Build it once: the GPU's library is loaded then."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._powercap = powercap
        self._nvml = _load_nvml()

    def read(self) -> Mapping[str, Counter]:
        """Now, by source; empty where nothing can be read."""
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
    """What was used, of all counters that both readings have; None: there is none."""
    known = before.keys() & after.keys()
    if not known:
        return None
    return sum(_rise(before[name], after[name]) for name in known) / 1e6


def _rise(before: Counter, after: Counter) -> int:
    """A counter may have begun anew, once."""
    if after.value >= before.value or after.wraps_at is None:
        return max(0, after.value - before.value)
    return after.value - before.value + after.wraps_at


def _read_rapl(folder: Path) -> Iterator[tuple[str, Counter]]:
    """Of whole packages: `intel-rapl:0`, not its parts (`intel-rapl:0:1`). AMD's are here too."""
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:
            continue
        # Since 2020 kernels let only root read it; some machines have none.
        with suppress(OSError, ValueError):
            value = int((zone / "energy_uj").read_text(encoding="ascii"))
            most = int((zone / "max_energy_range_uj").read_text(encoding="ascii"))
            yield zone.name, Counter(value, most)


def _load_nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
