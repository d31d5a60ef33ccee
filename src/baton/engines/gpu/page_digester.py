"""Digests of pages on a device, on a stream of its own: sum128 (`baton.kv.device_digest`)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from baton.errors import TransferError
from baton.kv.device_digest import WORD_BYTES, PieceParts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray

_LOW: Final = 0xFFFF_FFFF
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
_FMIX: Final = 0xFF51_AFD7_ED55_8CCD - (1 << 64)
"""Both as torch's int64, whose products and sums are those of 64-bit words."""
_FALLBACK_BYTES: Final = 64 << 20
"""Of pages that the fallback copies at once."""


class DigestRuns(Protocol):
    """How runs of bytes are digested; queued on the current stream."""

    def __call__(
        self, memory: torch.Tensor, runs: NDArray[np.int64], num_pieces: int
    ) -> torch.Tensor:
        """int64 `[num_pieces, 2]`, A and B of each piece, on the memory's device.

        `memory` is uint8 `[n]`; a row of `runs`, int64 `[k, 4]`, is the first byte, how many, the
        first one's place among its piece's, and the piece. All lie in the memory.
        """
        ...


def choose_digests(device: torch.device) -> DigestRuns:
    """The kernel on a GPU with Triton, else torch's own operations."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return digest_by_kernel
    return digest_by_torch


def digest_by_kernel(
    memory: torch.Tensor, runs: NDArray[np.int64], num_pieces: int
) -> torch.Tensor:
    """See `DigestRuns`: with Triton's kernel."""
    kernel: Any = importlib.import_module("baton.engines.gpu.digest_kernel")
    common = int(np.gcd.reduce(runs[:, :2], axis=None)) if len(runs) else 0
    unit = kernel.compute_unit_bytes(memory.data_ptr(), common)
    # Sums that begin at 0, and the runs behind them: one upload for both.
    packed = np.concatenate((np.zeros(2 * num_pieces, np.int64), kernel.make_tiles(runs).ravel()))
    work = torch.from_numpy(packed)
    if memory.device.type == "cuda":
        work = work.pin_memory().to(memory.device, non_blocking=True)
    sums = work[: 2 * num_pieces].view(-1, 2)
    kernel.launch_digests(memory, work[2 * num_pieces :].view(-1, 4), sums, unit)
    return sums


def digest_by_torch(memory: torch.Tensor, runs: NDArray[np.int64], num_pieces: int) -> torch.Tensor:
    """See `DigestRuns`: in torch's own operations, which copy the bytes several times."""
    sums = torch.zeros(num_pieces, 2, dtype=torch.int64, device=memory.device)
    for num_bytes in np.unique(runs[:, 1]).tolist():
        alike = torch.from_numpy(runs[runs[:, 1] == num_bytes]).to(memory.device)
        step = max(1, _FALLBACK_BYTES // max(1, num_bytes))
        for first in range(0, len(alike), step):
            _add_runs(memory, alike[first : first + step], num_bytes, sums)
    return sums


def _add_runs(memory: torch.Tensor, runs: torch.Tensor, num_bytes: int, sums: torch.Tensor) -> None:
    """Add runs of one size to the sums of their pieces."""
    num_words = -(-num_bytes // WORD_BYTES)
    padded = torch.zeros(len(runs), num_words * WORD_BYTES, dtype=torch.uint8, device=memory.device)
    places = runs[:, :1] + torch.arange(num_bytes, device=memory.device)
    padded[:, :num_bytes] = memory[places]
    words = padded.view(torch.int64)
    key = runs[:, 2:3] // WORD_BYTES + torch.arange(1, num_words + 1, device=memory.device)
    key = key * _GOLDEN
    key = (key ^ _shift_right(key, 33)) * _FMIX
    key ^= _shift_right(key, 33)
    mixed = words ^ key
    found = torch.stack(
        (((mixed & _LOW) * _shift_right(mixed, 32)).sum(1), (words * (key | 1)).sum(1)), dim=1
    )
    sums.index_add_(0, runs[:, 3], found)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """As unsigned: torch's own repeats the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


class PageDigester:
    """The pages of one region on a device; see `baton.kv.device_digest.DevicePages`.

    Its stream has a high priority, so that a digest waits for no kernel of the model that has not
    begun. Owner thread: the handoff's.
    """

    def __init__(self, memory: torch.Tensor, arrays: Sequence[PageArray]) -> None:
        """`memory` is all of the region, uint8 `[n]`."""
        self._memory, self._arrays = memory, tuple(arrays)
        self._digest_runs = choose_digests(memory.device)
        self._stream: Any = None
        self._found = torch.empty(0, 2, dtype=torch.int64)

    def digest(self, layers: range, parts: PieceParts) -> bytes:
        """See `DevicePages`. What was written before the call is what is digested.

        Raises:
            TransferError: a run is outside its page, or the layers' pages have two sizes.
        """
        runs = self._locate(layers, parts)
        num_pieces = len(layers) * parts.num_pieces
        if self._memory.device.type == "cpu":
            found = self._digest_runs(self._memory, runs, num_pieces)
        else:
            found = self._digest_on_stream(runs, num_pieces)
        return found.numpy().astype("<i8").tobytes()

    def _digest_on_stream(self, runs: NDArray[np.int64], num_pieces: int) -> torch.Tensor:
        device = self._memory.device
        streams: Any = torch.get_device_module(device)
        if self._stream is None:
            self._stream = streams.Stream(device=device, priority=-1)
        if len(self._found) < num_pieces:
            self._found = torch.empty(2 * num_pieces, 2, dtype=torch.int64, pin_memory=True)
        found = self._found[:num_pieces]
        with streams.device(device), streams.stream(self._stream):
            found.copy_(self._digest_runs(self._memory, runs, num_pieces), non_blocking=True)
            done = streams.Event()
            done.record(self._stream)
        done.synchronize()
        return found

    def _locate(self, layers: range, parts: PieceParts) -> NDArray[np.int64]:
        """The runs of some layers, as `DigestRuns` takes them: the same in each of them."""
        arrays = self._arrays[layers.start : layers.stop]
        page_bytes, num_pages = arrays[0].page_bytes, min(each.num_pages for each in arrays)
        if any(each.page_bytes != page_bytes for each in arrays):
            raise TransferError("layers with pages of two sizes are digested one by one")
        pieces, pages, firsts, lengths, places = parts.runs.T
        is_inside = (pages >= 0) & (pages < num_pages) & (firsts >= 0) & (lengths > 0)
        if not (is_inside & (firsts + lengths <= page_bytes)).all():
            raise TransferError("bytes to be digested are outside the region's pages")
        offsets = np.array([each.offset_bytes for each in arrays], np.int64)
        runs = np.empty((len(arrays), len(pieces), 4), np.int64)
        runs[:, :, 0] = offsets[:, None] + (pages * page_bytes + firsts)
        runs[:, :, 1], runs[:, :, 2] = lengths, places
        runs[:, :, 3] = pieces + (np.arange(len(arrays)) * parts.num_pieces)[:, None]
        return runs.reshape(-1, 4)
