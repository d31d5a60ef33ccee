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

from baton.engines.gpu.page_copier import check_pairs, choose_copier
from baton.kv.copies import CopyGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

logger: Final = logging.getLogger(__name__)

STAGING_BYTES: Final = 8 << 20
_NO_SPANS: Final = np.empty((0, 3), np.int64)


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """Copies that were begun."""

    done: torch.Event

    def is_done(self) -> bool:
        """Whether all pages are in place; does not wait."""
        return bool(self.done.query())

    def wait(self) -> None:
        """Wait until they are."""
        self.done.synchronize()


class CopyStream:
    """Copies for one device. Owned by the engine's thread, whose current stream is the model's.

    Rows are those of `view_rows`. Host rows belong to memory that `pin_memory` was given: else the
    host waits within `to_host` and `to_device`. Until a copy is done, its pages hold still.
    """

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        # CUDA's module, or that of another accelerator; the CPU's does everything at once.
        self._streams: Any = torch.get_device_module(device)
        self._device, self._staging_bytes = device, staging_bytes
        on = {} if device.type == "cpu" else {"device": device}
        self._stream = self._streams.Stream(**on)
        self._copier = choose_copier(device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def to_host(
        self,
        pages: torch.Tensor,
        index: NDArray[np.int64],
        host: torch.Tensor,
        at: NDArray[np.int64],
    ) -> CopyEvent:
        """Begin: `host[at[i]] = pages[index[i]]`, as the model's stream will have left them.

        Raises:
            TransferError: a page is out of range, or pages of two sizes; nothing was begun.
        """
        check_pairs(pages, index, host, at)
        with self._on_copy_stream():
            if _count_runs(index, at) == _count_runs(at, at):
                _copy_runs(pages, index, host, at)
            else:
                for part in self._parts(len(index), pages.shape[1]):
                    staging, rows = self._stage(index[part], pages.shape[1])
                    self._copier.gather(pages, index[part], staging)
                    _copy_runs(staging, rows, host, at[part])
            return self._record_event()

    def to_device(
        self,
        host: torch.Tensor,
        at: NDArray[np.int64],
        pages: torch.Tensor,
        index: NDArray[np.int64],
    ) -> CopyEvent:
        """Begin: `pages[index[i]] = host[at[i]]`, behind all that the model's stream was given.

        What the model's stream is given from now on sees these pages.

        Raises:
            TransferError: see `to_host`.
        """
        check_pairs(host, at, pages, index)
        with self._on_copy_stream():
            if _count_runs(at, index) == _count_runs(at, at):
                _copy_runs(host, at, pages, index)
            else:
                for part in self._parts(len(index), pages.shape[1]):
                    staging, rows = self._stage(index[part], pages.shape[1])
                    _copy_runs(host, at[part], staging, rows)
                    self._copier.scatter(staging, index[part], pages)
            event = self._record_event()
        self._streams.current_stream(self._device).wait_event(event.done)
        return event

    def _on_copy_stream(self) -> Any:  # noqa: ANN401 - the device module's context
        """The copy stream's stream is current, and waits for what was given to the one that was."""
        written = self._streams.Event()
        written.record(self._streams.current_stream(self._device))
        self._stream.wait_event(written)
        return self._streams.stream(self._stream)

    def _record_event(self) -> CopyEvent:
        done = self._streams.Event()
        done.record(self._stream)
        return CopyEvent(done)

    def _parts(self, num_pages: int, page_bytes: int) -> Iterator[slice]:
        step = max(1, self._staging_bytes // page_bytes)
        for first in range(0, num_pages, step):
            yield slice(first, first + step)

    def _stage(
        self, index: NDArray[np.int64], page_bytes: int
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Room on the device for these pages; its users are in the order of one stream."""
        num_bytes = len(index) * page_bytes
        if self._staging.numel() < num_bytes:
            with torch.inference_mode(mode=False):  # it is written to outside of inference as well
                self._staging = torch.empty(
                    max(num_bytes, self._staging_bytes), dtype=torch.uint8, device=self._device
                )
        return self._staging[:num_bytes].view(-1, page_bytes), np.arange(len(index))


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


def _count_runs(source: NDArray[np.int64], target: NDArray[np.int64]) -> int:
    return CopyGroup(source, target, _NO_SPANS).num_runs


def _copy_runs(
    source: torch.Tensor,
    source_index: NDArray[np.int64],
    target: torch.Tensor,
    target_index: NDArray[np.int64],
) -> None:
    """Pages that are neighbours on both sides in one copy each."""
    for first, to, num_pages in CopyGroup(source_index, target_index, _NO_SPANS).runs:
        target[to : to + num_pages].copy_(source[first : first + num_pages], non_blocking=True)
