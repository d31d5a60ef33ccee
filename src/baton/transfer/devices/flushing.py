"""Ranges that were written, and how they leave this processor's caches.

`none`: processors that share the memory keep each other's caches right; so do all of one host.
`msync`: the kernel writes the ranges back to the file: they are durable, and beyond this host's
caches if the file lies on fsdax. What another host has cached stays there.
`libpmem`: `pmem_flush` line by line, then `pmem_drain`. With CLWB kept out of it, on x86 each line
is written back *and* evicted, so the same call serves a reader that must not see old lines.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, assert_never

import numpy as np

from baton.config.environment import change_environment
from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


Flush: TypeAlias = Literal["none", "msync", "libpmem"]

LINE_BYTES: Final = 64
LIBPMEM: Final = "libpmem.so.1"
MAPS: Final = Path("/proc/self/maps")


class Flusher(Protocol):
    """How ranges of one mapping leave the caches. `unit_bytes`: what starts and lengths come in.

    `evicts`: nothing of them stays in this processor's caches, so that the next load is fresh.
    """

    unit_bytes: int
    evicts: bool

    def flush(
        self, mapping: mmap.mmap, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """Write ranges back, int64 `[r]` each, ascending and apart; returns when it is done.

        Raises:
            TransferError: the kernel could not.
        """
        ...


class MsyncFlusher:
    """`msync(MS_SYNC)`; DAX devices have no such thing."""

    unit_bytes = mmap.PAGESIZE
    evicts = False

    def flush(
        self, mapping: mmap.mmap, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """See `Flusher`."""
        try:
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                mapping.flush(start, min(length, len(mapping) - start))
        except OSError as exc:
            raise TransferError(f"msync failed: {exc}") from exc


class LibpmemFlusher:
    """`pmem_flush` of each range, one `pmem_drain`."""

    unit_bytes = LINE_BYTES
    evicts = True

    def __init__(self) -> None:
        self._flush, self._drain = load_libpmem()

    def flush(
        self, mapping: mmap.mmap, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """See `Flusher`."""
        base = np.frombuffer(mapping, np.uint8).ctypes.data
        for start, length in zip((base + starts).tolist(), lengths.tolist(), strict=True):
            self._flush(start, length)
        self._drain()


def make_flusher(flush: Flush) -> Flusher | None:
    """What an operator chose; None where nothing is to be done.

    Raises:
        ConfigError: this machine or its libraries cannot do that.
    """
    match flush:
        case "none":
            return None
        case "msync":
            return MsyncFlusher()
        case "libpmem":
            return LibpmemFlusher()
        case unknown:
            assert_never(unknown)


def coalesce(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], unit_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same bytes as few ranges, widened to whole units: ascending, apart, int64 `[r]` each.

    The ranges given come in any order, may touch and may overlap.
    """
    first = starts // unit_bytes * unit_bytes
    behind = -(-(starts + lengths) // unit_bytes) * unit_bytes
    order = np.argsort(first, kind="stable")
    first, reached = first[order], np.maximum.accumulate(behind[order])
    is_first = np.ones(len(first), np.bool_)
    is_first[1:] = first[1:] > reached[:-1]
    is_last = np.ones(len(first), np.bool_)
    is_last[:-1] = is_first[1:]
    return first[is_first], reached[is_last] - first[is_first]


@cache
def open_libpmem() -> ctypes.CDLL:
    """libpmem, with the one environment that it is loaded with: it reads it then.

    `pmem_flush` must use an instruction that evicts (CLFLUSHOPT or CLFLUSH, never CLWB), and flush
    also where the platform keeps its own caches' content over a power cut, which it takes for a
    reason not to.

    Raises:
        ConfigError: another architecture, libpmem is not installed, or was loaded before.
    """
    if platform.machine() != "x86_64":
        raise ConfigError(f"libpmem evicts on x86 only; this is {platform.machine()}")
    if LIBPMEM in MAPS.read_text(errors="replace"):
        raise ConfigError("another library has loaded libpmem before, with settings of its own")
    change_environment({"PMEM_NO_CLWB": "1", "PMEM_NO_FLUSH": "0"})
    try:
        return ctypes.CDLL(LIBPMEM)
    except OSError as exc:
        raise ConfigError(f"{LIBPMEM} is needed ({exc}): apt-get install libpmem1") from exc


def load_libpmem() -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """`pmem_flush(address, num_bytes)` and `pmem_drain()`.

    Raises:
        ConfigError: see `open_libpmem`.
    """
    library = open_libpmem()
    flush, drain = library.pmem_flush, library.pmem_drain
    flush.argtypes, flush.restype = [ctypes.c_void_p, ctypes.c_size_t], None
    drain.argtypes, drain.restype = [], None
    return flush, drain
