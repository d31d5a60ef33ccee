"""Pages between a GPU and pinned memory of the host, on a stream of its own.

The model computes on its stream and never waits for a copy to the host; a copy waits, on the GPU,
for what the model had been given to do when it was asked for. The host waits for neither, until it
asks to. Plain moves are the copy engines' work; a kernel only gathers pages where that makes one
copy of many.

    model's stream   ── layer 0 ──┬── layer 1 ──┬── layer 2 …
                              written       written            (events)
    copy stream's stream                └► copy 0 ───► copy 1 …
                                        └ done    └ done       (events; the host asks)
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from baton.engines.gpu.page_copier import (
    ROW_DIMS,
    IndexedCopier,
    check_pairs,
    choose_copier,
    upload_index,
)
from baton.errors import BatonError, TransferError, mapped
from baton.kv.copies import CopyGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from baton.engines.gpu.page_copier import PageCopier

logger: Final = logging.getLogger(__name__)

STAGING_BYTES: Final = 8 << 20
DEVICE_ERRORS: Final[dict[type[Exception], type[BatonError]]] = {RuntimeError: TransferError}
"""For `mapped`: what a device refuses, for want of memory too, or reports of earlier work."""
_NO_SPANS: Final = np.empty((0, 3), np.int64)


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """What a device was given until then: copies, an engine's work. Implements `StreamPosition`."""

    done: torch.Event

    def is_done(self) -> bool:
        """Whether it has done all of it; does not wait.

        Raises:
            TransferError: the device failed.
        """
        with mapped(DEVICE_ERRORS):
            return bool(self.done.query())

    def wait(self) -> None:
        """Wait until it has.

        Raises:
            TransferError: the device failed.
        """
        with mapped(DEVICE_ERRORS):
            self.done.synchronize()


def make_recorder(device: torch.device) -> Callable[[], CopyEvent | None]:
    """A function that records an event on the calling thread's current stream of a device.

    On CPUs, where nothing runs behind the caller's back, it returns None.
    """
    if device.type == "cpu":
        return lambda: None
    streams = torch.get_device_module(device)

    def record() -> CopyEvent:
        event: torch.Event = streams.Event()
        event.record(streams.current_stream(device))
        return CopyEvent(event)

    return record


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages that cross together, in runs `[first row, first of the host's, number]`.

    Rows are the pages' own; with `index`, which is on the device, those of staging memory there.
    """

    num_pages: int
    runs: list[list[int]]
    index: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """How pages `index` cross to or from rows `at` of the host."""

    kind: tuple[torch.Size, torch.dtype, torch.Size]
    index: NDArray[np.int64]
    at: NDArray[np.int64]
    parts: list[_Part]

    def is_of(
        self,
        kind: tuple[torch.Size, torch.dtype, torch.Size],
        index: NDArray[np.int64],
        at: NDArray[np.int64],
    ) -> bool:
        """Whether it is for these pages of such arrays."""
        is_same = self.kind == kind and np.array_equal(self.index, index)
        return is_same and np.array_equal(self.at, at)


class CopyStream:
    """Copies for one device, one after the other. Owned by one thread.

    That is the engine's, whose current stream is the model's; or another one, which names by
    `after` what the model's stream has to have done before a copy begins.

    Host rows are those of `view_rows`, in memory that `pin_memory` was given: else the host waits
    within `to_host` and `to_device`. Pages on the device are such rows too, or `[n, …]` in whatever
    order their bytes lie: the rows of the host are in the order of the dimensions. Until a copy is
    done, its pages hold still.
    """

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        # CUDA's module, or that of another accelerator; the CPU's does everything at once.
        self._streams: Any = torch.get_device_module(device)
        self._device, self._staging_bytes = device, staging_bytes
        on = {} if device.type == "cpu" else {"device": device}
        self._stream = self._streams.Stream(**on)
        self._copier, self._reorderer = choose_copier(device), IndexedCopier()
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._last: _Plan | None = None

    def to_host(
        self,
        pages: torch.Tensor,
        index: NDArray[np.int64],
        host: torch.Tensor,
        at: NDArray[np.int64],
        *,
        after: torch.Event | None = None,
    ) -> CopyEvent:
        """Begin: `host[at[i]] = pages[index[i]]`, as the model's stream will have left them.

        Without `after`, when it has done what the current stream was given until now.

        Raises:
            TransferError: a page is out of range, or pages of two sizes; nothing was begun.
        """
        with self._on_copy_stream(after):
            for part in self._plan(pages, index, host, at):
                source = pages
                if part.index is not None:
                    source = self._stage(part.num_pages, host.shape[1])
                    self._copier_for(pages).gather(pages, part.index, source)
                for first, to, num_pages in part.runs:
                    rows = source[first : first + num_pages]
                    host[to : to + num_pages].copy_(rows, non_blocking=True)
            return self._record_event()

    def to_device(
        self,
        host: torch.Tensor,
        at: NDArray[np.int64],
        pages: torch.Tensor,
        index: NDArray[np.int64],
        *,
        after: torch.Event | None = None,
    ) -> CopyEvent:
        """Begin: `pages[index[i]] = host[at[i]]`, behind all that the model's stream was given.

        Without `after`, what the current stream is given from now on sees these pages. With it,
        what any stream is given once the copy is done.

        Raises:
            TransferError: see `to_host`.
        """
        with self._on_copy_stream(after):
            for part in self._plan(pages, index, host, at):
                is_staged = part.index is not None
                target = self._stage(part.num_pages, host.shape[1]) if is_staged else pages
                for first, to, num_pages in part.runs:
                    rows = host[to : to + num_pages]
                    target[first : first + num_pages].copy_(rows, non_blocking=True)
                if part.index is not None:
                    self._copier_for(pages).scatter(target, part.index, pages)
            event = self._record_event()
        if after is None:
            self._streams.current_stream(self._device).wait_event(event.done)
        return event

    def warm_up(self, pages: torch.Tensor) -> None:
        """Begin to compile and allocate what copies of such pages take; no page changes."""
        index = np.arange(min(2, len(pages)))
        with self._on_copy_stream(None):
            copier = self._copier_for(pages)
            staging = self._stage(len(index), pages.shape[1:].numel() * pages.element_size())
            copier.gather(pages, index, staging)
            copier.scatter(staging, index, pages)

    def wait(self) -> None:
        """Wait until all copies that were begun are done: their memory can be given back."""
        self._record_event().wait()

    def _copier_for(self, pages: torch.Tensor) -> PageCopier:
        return self._copier if pages.dim() == ROW_DIMS else self._reorderer

    def _on_copy_stream(self, after: torch.Event | None) -> Any:  # noqa: ANN401 - the device module's context
        """The copy stream's stream is current, and waits for `after`."""
        if after is None:
            after = self._streams.Event()
            after.record(self._streams.current_stream(self._device))
        self._stream.wait_event(after)
        return self._streams.stream(self._stream)

    def _record_event(self) -> CopyEvent:
        done = self._streams.Event()
        done.record(self._stream)
        return CopyEvent(done)

    def _plan(
        self,
        pages: torch.Tensor,
        index: NDArray[np.int64],
        host: torch.Tensor,
        at: NDArray[np.int64],
    ) -> list[_Part]:
        """How these pages cross. Layers of one handoff cross in the same way: the last is kept."""
        kind, last = (pages.shape, pages.dtype, host.shape), self._last
        if last is not None and last.is_of(kind, index, at):
            return last.parts
        check_pairs(pages, index, host, at)
        group = CopyGroup(index, at, _NO_SPANS)
        is_direct = pages.dim() == ROW_DIMS and group.num_runs == _count_runs(at)
        parts = [_Part(len(index), group.runs)] if is_direct else self._plan_staged(index, at, host)
        self._last = _Plan(kind, index.copy(), at.copy(), parts)
        return parts

    def _plan_staged(
        self, index: NDArray[np.int64], at: NDArray[np.int64], host: torch.Tensor
    ) -> list[_Part]:
        parts: list[_Part] = []
        step = max(1, self._staging_bytes // host.shape[1])
        for first in range(0, len(index), step):
            some = slice(first, first + step)
            rows = np.arange(len(index[some]))
            runs = CopyGroup(rows, at[some], _NO_SPANS).runs
            parts.append(_Part(len(rows), runs, upload_index(index[some], self._device)))
        return parts

    def _stage(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """Room on the device for so many pages; its users are in the order of one stream."""
        num_bytes = num_pages * page_bytes
        if self._staging.numel() < num_bytes:
            with torch.inference_mode(mode=False):  # it is written to outside of inference as well
                self._staging = torch.empty(
                    max(num_bytes, self._staging_bytes), dtype=torch.uint8, device=self._device
                )
        return self._staging[:num_bytes].view(-1, page_bytes)


def pin_memory(memory: memoryview, device: torch.device) -> None:
    """Let a GPU read and write the host's memory by itself; it stays so until the process ends.

    Without it copies are right but the host waits for each of them: that is logged.
    """
    if device.type != "cuda":
        return
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    result = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
        address, len(memory), 0
    )
    if int(result) != 0:
        logger.warning(
            "cannot pin %d bytes of KV pages (%s): copies to the GPU hold up the engine",
            len(memory),
            result,
        )
        # CUDA reports an error once more, to the next kernel's launch: not to the model's.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)


def _count_runs(rows: NDArray[np.int64]) -> int:
    return CopyGroup(rows, rows, _NO_SPANS).num_runs
