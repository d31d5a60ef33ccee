"""Encodings by the error that an operator allows instead of by name.

The error of an encoding: of each channel the RMS of what changes over the RMS of its numbers, and
the RMS of that over channels; of keys or of values, whichever is larger. It is that of reference KV
of all heads in blocks of one size, so all workers of a model choose the same, on whatever machine.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.encodings.interface import ENCODINGS, RAW, KVEncoding
from baton.encodings.planes import NUMPY_DTYPES, find_planes, shape_numbers
from baton.encodings.reference import make_reference_kv
from baton.errors import ConfigError
from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout

logger = logging.getLogger(__name__)

SAMPLE_NUMBERS: Final = 1 << 17
"""Of reference KV, at least: enough for two digits of an error."""
SIMILAR_BYTES: Final = 1.25
"""An encoding of so many times the bytes of another one, or fewer, replaces it if it errs less."""


class Candidate(Record, frozen=True):
    """An encoding, its error to two digits, and its bytes over raw ones."""

    encoding: KVEncoding
    error: float
    share: float


def find_smallest(error_budget: float, layout: KVLayout) -> KVEncoding:
    """The encoding for entries: the fewest bytes within the budget, or raw."""
    candidates = _drop_worse(list_within(error_budget, layout))
    chosen = min(candidates, key=lambda each: (each.share, each.error))
    _log("store", error_budget, [chosen])
    return chosen.encoding


def find_for_links(error_budget: float, layout: KVLayout) -> tuple[KVEncoding, ...]:
    """Those within the budget of which any may be the quickest on some link, raw apart."""
    by_token = [
        each for each in list_within(error_budget, layout) if each.encoding.grouping == "token"
    ]
    chosen = [each for each in _drop_worse(by_token) if each.encoding.name != RAW]
    _log("handoff", error_budget, chosen)
    return tuple(each.encoding for each in chosen)


def check_is_alone(section: str, kind: str) -> None:
    """Refuse an encoding's name beside an error budget.

    Raises:
        ConfigError: there is one.
    """
    if kind != RAW:
        raise ConfigError(f'{section}.encoding = "{kind}" and {section}.error_budget: set one only')


def list_within(error_budget: float, layout: KVLayout) -> list[Candidate]:
    """All installed encodings of at most this error for such KV, by name; raw is among them."""
    found = []
    for kind in ENCODINGS.kinds():
        encoding = ENCODINGS.build(kind, {})
        with suppress(ConfigError):
            encoding.check(layout)
            found.append(measure(encoding, layout))
    return [each for each in found if each.error <= error_budget]


def measure(encoding: KVEncoding, layout: KVLayout) -> Candidate:
    """What an encoding does to reference KV of a layout in canonical order."""
    if encoding.name == RAW:  # of any dtype
        return Candidate(encoding, 0.0, 1.0)
    layout = msgspec.structs.replace(layout, layers=tuple(dict.fromkeys(layout.layers)))
    num_blocks = -(-SAMPLE_NUMBERS * layout.element_bytes // layout.block_bytes)
    blocks = make_reference_kv(layout, num_blocks)
    encoded, decoded = encoding.encode(layout, blocks), np.empty_like(blocks)
    encoding.decode(layout, encoded, decoded)
    share = sum(map(len, encoded)) / blocks.nbytes
    return Candidate(encoding, float(f"{measure_error(layout, blocks, decoded):.2g}"), share)


def measure_error(layout: KVLayout, exact: NDArray[np.uint8], decoded: NDArray[np.uint8]) -> float:
    """See above: of keys and latents, or of values; the larger one.

    Both are uint8 `[num_blocks, layout.block_bytes]`: finite numbers in canonical order.
    """
    dtype = NUMPY_DTYPES[layout.dtype]
    ratios: dict[bool, list[NDArray[np.float64]]] = {}
    for run in find_planes(layout, lambda shape: shape.num_numbers * layout.element_bytes):
        before, after = (
            shape_numbers(run.shape, run.view(each).view(dtype)).astype(np.float64)
            for each in (exact, decoded)
        )
        lost, kept = (np.square(each).sum((0, 2)) for each in (after - before, before))
        ratio = np.divide(lost, kept, out=np.zeros_like(kept), where=kept > 0)
        ratios.setdefault(run.shape.is_value, []).append(ratio.reshape(-1))
    return max(math.sqrt(np.concatenate(each).mean()) for each in ratios.values())


def _drop_worse(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without those that another one beats: less error in as many bytes, or hardly more."""
    return [
        each
        for each in candidates
        if not any(
            other.error < each.error and other.share <= each.share * SIMILAR_BYTES
            for other in candidates
        )
    ]


def _log(section: str, error_budget: float, chosen: Sequence[Candidate]) -> None:
    found = ", ".join(
        f"{c.encoding.name} (error {c.error}, {c.share:.2f} of the bytes)" for c in chosen
    )
    logger.info("%s.error_budget = %g: %s", section, error_budget, found or RAW)
