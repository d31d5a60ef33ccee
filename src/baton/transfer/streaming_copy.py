"""Copies past the caches, of what this processor does not read again soon.

A usual store reads its line from memory first, and puts out of the caches what is in them. libpmem
has copies with non-temporal stores, which do neither, for any length; the C library makes them from
a length on that is that of hundreds of MiB on many virtual machines.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Copy: TypeAlias = Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]

_NONTEMPORAL: Final = 1 << 1
"""PMEM_F_MEM_NONTEMPORAL of libpmem.h."""
_LIBPMEM: Final = "libpmem.so.1"


@dataclass(frozen=True, slots=True)
class StreamingCopy:
    """`copy(into, source)` of contiguous arrays of one length, uint8 `[n]`; the caller owns both.

    Other threads run meanwhile; what is written is visible to all processors when it returns.
    `library` is what copies; `refusal` why that is not libpmem.
    """

    copy: Copy
    library: Literal["libpmem", "memcpy"]
    refusal: str = ""


def open_libpmem() -> ctypes.CDLL:
    """Load libpmem.

    Raises:
        ConfigError: another architecture, or libpmem is not installed.
    """
    if platform.machine() != "x86_64":
        raise ConfigError(f"libpmem copies past the caches on x86 only, not {platform.machine()}")
    try:
        return ctypes.CDLL(_LIBPMEM)
    except OSError as exc:
        raise ConfigError(f"{_LIBPMEM} is needed ({exc}): apt-get install libpmem1") from exc


@cache
def find_streaming_copy() -> StreamingCopy:
    """By libpmem; by memcpy (numpy's) where that is not installed or cannot be used."""
    try:
        library = open_libpmem()
    except ConfigError as exc:
        return StreamingCopy(np.copyto, "memcpy", str(exc))
    memcpy = ctypes.CFUNCTYPE(
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    )(("pmem_memcpy", library))

    def copy(into: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        if len(into) != len(source):
            raise ValueError(f"{len(source)} bytes into {len(into)}")
        memcpy(_address(into), _address(source), len(source), _NONTEMPORAL)

    return StreamingCopy(copy, "libpmem")


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
