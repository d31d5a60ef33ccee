"""A kernel that copies many short runs at once, for the driver to compile (PTX).

Given to the driver as copies, each run costs the calling thread some 5 us, whatever its length.
Here each warp takes a run, or a part of one, and has 4 KiB in flight. The runs are the kernel's
parameters: nothing has to be uploaded. Copied are multiples of 16 bytes.
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
WARPS_PER_BLOCK: Final = NUM_THREADS // 32
MAX_PARTS: Final = 8
"""Warps that share a run, where runs are few: part p has pieces p, p + parts, … of 4 KiB."""
LONG_RUN_BYTES: Final = 256 << 10
"""From this mean length on, copy engines are as fast, and take no multiprocessor."""
UNIT_BYTES: Final = 16


class CopyKernel:
    """The kernel, compiled for the device of the context that is current; so it must be later."""

    def __init__(self, driver: Driver, multiprocessors: int) -> None:
        """Takes some 10 ms.

        Raises:
            TransferError: the driver is older than CUDA 12.1, or has no compiler; the GPU is older
                than compute capability 8.0.
        """
        self._driver, self._multiprocessors = driver, multiprocessors
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._runs = (ctypes.c_uint64 * (3 * MAX_RUNS))()
        self._num_runs, self._num_parts = ctypes.c_uint32(), ctypes.c_uint32()
        parameters = self._runs, self._num_runs, self._num_parts
        self._parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, parameters))
        driver.call("cuModuleLoadData", ctypes.byref(self._module), PTX)
        driver.call("cuModuleGetFunction", ctypes.byref(self._function), self._module, b"copy_runs")

    def enqueue(self, runs: NDArray[np.uint64], stream: int) -> None:
        """Queue copies, in no order: see `CopyDevice.enqueue`."""
        for at in range(0, len(runs), MAX_RUNS):
            part = np.ascontiguousarray(runs[at : at + MAX_RUNS])
            num_parts = count_parts(len(part), self._multiprocessors)
            ctypes.memmove(self._runs, part.ctypes.data, part.nbytes)
            self._num_runs.value, self._num_parts.value = len(part), num_parts
            blocks = (min(self._multiprocessors, len(part) * num_parts), 1, 1)
            threads, shared_bytes = (NUM_THREADS, 1, 1), 0
            # The driver copies the parameters before it returns.
            self._driver.call(
                "cuLaunchKernel",
                self._function,
                *blocks,
                *threads,
                shared_bytes,
                stream,
                self._parameters,
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


def count_parts(num_runs: int, multiprocessors: int) -> int:
    """How many warps share each run: so many that no warp is idle, and they end together."""
    return max(1, min(MAX_PARTS, 4 * multiprocessors * WARPS_PER_BLOCK // num_runs))


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
.visible .entry copy_runs(
  .param .align 8 .b8 runs[{MAX_RUNS * 24}], .param .u32 num_runs, .param .u32 num_parts
)
.maxntid {NUM_THREADS}, 1, 1
{{
  .reg .pred %is_over;
  .reg .b32 %thread, %lane, %warp, %block, %num_blocks, %num_warps, %number, %step, %num, %parts;
  .reg .b32 %owner, %part, %piece;
  .reg .b32 %word<32>;
  .reg .b64 %run, %offset, %source, %target, %end, %first, %last, %stride;
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
  ld.param.u32 %parts, [num_parts];
  mul.lo.u32 %num, %num, %parts;
  mul.wide.u32 %stride, %parts, 4096;
next:
  setp.ge.u32 %is_over, %number, %num;
  @%is_over bra done;
  div.u32 %owner, %number, %parts;
  rem.u32 %part, %number, %parts;
  shl.b32 %part, %part, 8;
  add.u32 %piece, %part, %lane;
  mul.wide.u32 %first, %piece, 16;
  mul.wide.u32 %offset, %owner, 24;
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
  add.s64 %source, %source, %stride;
  add.s64 %target, %target, %stride;
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
"""Warp w of block b copies item `w * blocks + b`, and so on: item i is part `i % parts` of run
`i // parts`. A lane's words are 512 bytes apart; a part's pieces of 4 KiB, `parts` pieces apart.
"""
