"""A kernel that copies many short runs at once, for the driver to compile (PTX).

A copy engine takes about a microsecond for each run, whatever its length, so that scattered pages
reach a fraction of the memory's bandwidth. Here each warp takes a run, 4 KiB in flight. The runs
are the kernel's parameters: nothing has to be uploaded. Copied are multiples of 16 bytes.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.transfer.transports.cuda_ipc.driver import Driver

MAX_RUNS: Final = 1360
"""Of one launch: parameters are 32,764 bytes at most (CUDA 12.1, compute capability 7.0)."""
NUM_THREADS: Final = 1024
"""Of one block; one block takes a multiprocessor."""
MAX_SEGMENT_BYTES: Final = 16 << 10
"""What one warp copies: longer runs are cut, so that warps end together."""
LONG_RUN_BYTES: Final = 256 << 10
"""From this mean length on, copy engines are as fast, and take no multiprocessor."""
UNIT_BYTES: Final = 16


class CopyKernel:
    """The kernel, compiled for the device of the context that is current; so it must be later."""

    def __init__(self, driver: Driver, multiprocessors: int) -> None:
        """Takes some 10 ms.

        Raises:
            TransferError: the driver is older than CUDA 12.1, or has no compiler.
        """
        self._driver, self._multiprocessors = driver, multiprocessors
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(self._module), PTX)
        driver.call("cuModuleGetFunction", ctypes.byref(self._function), self._module, b"copy_runs")

    def enqueue(self, runs: NDArray[np.uint64], stream: int) -> None:
        """Queue copies, in no order: see `CopyDevice.enqueue`."""
        segments = cut_runs(runs)
        parameter, num_runs = (ctypes.c_uint64 * (3 * MAX_RUNS))(), ctypes.c_uint32()
        pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, (parameter, num_runs)))
        for at in range(0, len(segments), MAX_RUNS):
            part = segments[at : at + MAX_RUNS]
            ctypes.memmove(parameter, part.ctypes.data, part.nbytes)
            num_runs.value = len(part)
            blocks = (min(self._multiprocessors, len(part)), 1, 1)
            threads, shared_bytes = (NUM_THREADS, 1, 1), 0
            # The driver copies the parameters before it returns.
            self._driver.call(
                "cuLaunchKernel",
                self._function,
                *blocks,
                *threads,
                shared_bytes,
                stream,
                pointers,
                None,
            )

    def close(self) -> None:
        """Unload it, once its copies have ended."""
        self._driver.call("cuModuleUnload", self._module)


def suits_kernel(runs: NDArray[np.uint64]) -> bool:
    """Whether these runs, uint64 `[r, 3]` of (source, destination, bytes), are for the kernel."""
    num_bytes = int(runs[:, 2].sum())
    all_bits = int(np.bitwise_or.reduce(runs, axis=None))
    return num_bytes < LONG_RUN_BYTES * len(runs) and all_bits % UNIT_BYTES == 0


def cut_runs(runs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same bytes in runs of `MAX_SEGMENT_BYTES` at most, uint64 `[s, 3]`."""
    lengths = runs[:, 2].astype(np.int64)
    counts = -(-lengths // MAX_SEGMENT_BYTES)
    owners = np.repeat(np.arange(len(runs)), counts)
    firsts = np.cumsum(counts) - counts
    offsets = (np.arange(len(owners)) - firsts[owners]) * MAX_SEGMENT_BYTES
    segments = runs[owners]
    segments[:, :2] += offsets.astype(np.uint64)[:, None]
    segments[:, 2] = np.minimum(lengths[owners] - offsets, MAX_SEGMENT_BYTES)
    return segments


def _many(form: str) -> str:
    """One line for each of the eight 16-byte words that a lane has in flight."""
    return "\n".join(
        "  " + form.format(at=512 * i, words=", ".join(f"%word{4 * i + j}" for j in range(4)))
        for i in range(8)
    )


PTX: Final = f"""
.version 8.1
.target sm_80
.address_size 64
.visible .entry copy_runs(.param .align 8 .b8 runs[{MAX_RUNS * 24}], .param .u32 num_runs)
.maxntid {NUM_THREADS}, 1, 1
{{
  .reg .pred %is_over;
  .reg .b32 %thread, %lane, %warp, %block, %num_blocks, %num_warps, %number, %step, %num;
  .reg .b32 %word<32>;
  .reg .b64 %run, %offset, %source, %target, %end, %first, %last;
  mov.u32 %thread, %tid.x;
  and.b32 %lane, %thread, 31;
  shr.u32 %warp, %thread, 5;
  mov.u32 %block, %ctaid.x;
  mov.u32 %num_blocks, %nctaid.x;
  mov.u32 %num_warps, %ntid.x;
  shr.u32 %num_warps, %num_warps, 5;
  mad.lo.u32 %number, %warp, %num_blocks, %block;
  mul.lo.u32 %step, %num_blocks, %num_warps;
  ld.param.u32 %num, [num_runs];
  mul.wide.u32 %first, %lane, 16;
next:
  setp.ge.u32 %is_over, %number, %num;
  @%is_over bra done;
  mul.wide.u32 %offset, %number, 24;
  mov.b64 %run, runs;
  add.s64 %run, %run, %offset;
  ld.param.u64 %source, [%run];
  ld.param.u64 %target, [%run+8];
  ld.param.u64 %end, [%run+16];
  add.s64 %end, %end, %source;
  add.s64 %source, %source, %first;
  add.s64 %target, %target, %first;
  add.u32 %number, %number, %step;
wide:
  add.s64 %last, %source, 3600;
  setp.gt.u64 %is_over, %last, %end;
  @%is_over bra narrow;
{_many("ld.global.v4.u32 {{{words}}}, [%source+{at}];")}
{_many("st.global.v4.u32 [%target+{at}], {{{words}}};")}
  add.s64 %source, %source, 4096;
  add.s64 %target, %target, 4096;
  bra wide;
narrow:
  setp.ge.u64 %is_over, %source, %end;
  @%is_over bra next;
  ld.global.v4.u32 {{%word0, %word1, %word2, %word3}}, [%source];
  st.global.v4.u32 [%target], {{%word0, %word1, %word2, %word3}};
  add.s64 %source, %source, 512;
  add.s64 %target, %target, 512;
  bra narrow;
done:
  ret;
}}
""".encode()
"""Warp w of block b copies runs `w * blocks + b`, and so on; lane l words l, l + 32, …"""
