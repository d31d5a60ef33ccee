"""Lossless compression of bodies by a tier, and whether it pays there. Pure: no I/O, no clock.

A tier that compresses gives back what was put: it changes neither names nor what KV is, and tiers
above and below it do not notice. What compresses in KV is the highest byte of each number
(`encodings.exponents`); how many bytes a number has is found by trial, for a tier does not know.

    off ──compressed is quicker by a tenth──► on        what is measured: the medium's seconds for
    on ──it is no quicker──► off                        a byte, the codec's, and the ratio
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.encodings.exponents import decode_numbers, encode_numbers
from baton.errors import ProtocolError
from baton.store.entry_format import MAX_EXPANSION
from baton.store.interface import CompressionReport

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.store.interface import Body

MIN_BODY_BYTES: Final = 16 << 10
"""Smaller ones are kept as they are: the medium's time for them does not depend on their size."""
MAX_RATIO: Final = 0.95
"""What does not become smaller than this is kept as it is."""
GAIN_TO_BEGIN: Final = 0.9
TRIAL_INTERVAL: Final = 64
"""While it is off, one body of so many is compressed to learn what that takes; and the first."""
_WIDTHS: Final = (2, 4, 1)
_SAMPLE_BYTES: Final = 64 << 10
_LEARNING: Final = 0.1
"""Weight of the latest observation."""


def compress(body: Body) -> bytes | None:
    """A body in fewer bytes; None where they are not enough fewer, or too few."""
    if len(body) < MIN_BODY_BYTES:
        return None
    numbers = np.frombuffer(body, np.uint8)
    middle = max(0, len(numbers) // 2 - _SAMPLE_BYTES // 2) & ~3
    sample = numbers[middle : middle + _SAMPLE_BYTES]
    ratios = {w: len(encode_numbers(_whole(sample, w), w)) / len(sample) for w in _WIDTHS}
    width = min(ratios, key=lambda each: ratios[each])
    if ratios[width] > MAX_RATIO or len(numbers) % width:
        return None
    compressed = bytes((width,)) + encode_numbers(numbers, width).tobytes()
    is_worth_it = len(body) / MAX_EXPANSION <= len(compressed) <= MAX_RATIO * len(body)
    return compressed if is_worth_it else None


def decompress(compressed: memoryview, into: memoryview) -> None:
    """The body that was compressed, into as many bytes as it had.

    Raises:
        ProtocolError: these bytes are no body of that length.
    """
    encoded, body = np.frombuffer(compressed, np.uint8), np.frombuffer(into, np.uint8)
    width = int(encoded[0]) if len(encoded) else 0
    if width not in _WIDTHS or len(body) % width:
        raise ProtocolError(f"a compressed body of numbers of {width} bytes")
    decode_numbers(encoded[1:], width, body)


def _whole(sample: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    return sample[: len(sample) // width * width]


@dataclass(slots=True)
class _Rate:
    """Seconds for a byte; 0: not known yet."""

    byte_s: float = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        latest = seconds / max(1, num_bytes)
        self.byte_s += (_LEARNING if self.byte_s else 1.0) * (latest - self.byte_s)


@dataclass(slots=True)
class CompressionChoice:
    """Whether a body is compressed before it is written. One owner thread.

    What counts is the time of one write and one read of a body. `is_adaptive` False: always on.
    """

    is_adaptive: bool
    is_on: bool = field(init=False)
    raw_bytes: int = 0
    compressed_bytes: int = 0
    _writes: _Rate = field(default_factory=_Rate)
    _reads: _Rate = field(default_factory=_Rate)
    _compressing: _Rate = field(default_factory=_Rate)
    _decompressing: _Rate = field(default_factory=_Rate)
    _ratio: float = 1.0
    _num_since_trial: int = TRIAL_INTERVAL

    def __post_init__(self) -> None:
        self.is_on = not self.is_adaptive

    def begin_put(self, num_bytes: int) -> bool:
        """Whether the next body is to be compressed; also for a trial, while it is off."""
        if num_bytes < MIN_BODY_BYTES:
            return False
        if self.is_on:
            return True
        self._num_since_trial += 1
        if self._num_since_trial <= TRIAL_INTERVAL:
            return False
        self._num_since_trial = 0
        return True

    def observe_write(self, num_bytes: int, seconds: float) -> None:
        """The medium took so long for what was stored of a body."""
        self._writes.observe(num_bytes, seconds)
        self._decide()

    def observe_read(self, num_bytes: int, seconds: float) -> None:
        """The same of a read."""
        self._reads.observe(num_bytes, seconds)

    def observe_compression(self, raw_bytes: int, compressed_bytes: int, seconds: float) -> None:
        """A body became so much smaller; as large as it was where it was kept as it is."""
        self.raw_bytes += raw_bytes
        self.compressed_bytes += compressed_bytes
        self._ratio += _LEARNING * (compressed_bytes / raw_bytes - self._ratio)
        if self._compressing.byte_s == 0:
            self._ratio = compressed_bytes / raw_bytes
        self._compressing.observe(raw_bytes, seconds)

    def observe_decompression(self, raw_bytes: int, seconds: float) -> None:
        """A body was made as it was."""
        self._decompressing.observe(raw_bytes, seconds)

    def report(self) -> CompressionReport:
        """What has become of bodies. From any thread."""
        return CompressionReport(self.raw_bytes, self.compressed_bytes, self.is_on)

    def _decide(self) -> None:
        if not self.is_adaptive or self._compressing.byte_s == 0:
            return
        medium_s = self._writes.byte_s + (self._reads.byte_s or self._writes.byte_s)
        codec_s = self._compressing.byte_s + (
            self._decompressing.byte_s or self._compressing.byte_s
        )
        gain = self._ratio * medium_s + codec_s
        self.is_on = gain < (medium_s if self.is_on else GAIN_TO_BEGIN * medium_s)
