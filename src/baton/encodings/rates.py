"""What an encoding takes for a byte of KV: calibrated when a worker starts, then measured by use.

Use counts for more than the calibration, as it has the cache misses and the competition for cores
of real requests. It counts for `FRESH_S`: an encoding that was slow while the machine was busy, and
is therefore not used, is not taken for slow without limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.encodings.reference import make_reference_kv

if TYPE_CHECKING:
    from baton.clock import Clock, Instant
    from baton.encodings.interface import KVEncoding
    from baton.kv.layout import KVLayout

FRESH_S: Final = 60.0
NUM_REMEMBERED: Final = 11
MIN_BYTES: Final = 1 << 18
"""Of KV that is encoded at once: the cost of the call itself hides the rate of less."""
CALIBRATION_BYTES: Final = 1 << 20
_NUM_ROUNDS: Final = 3
MIN_BYTE_S: Final = 1e-13


@dataclass(slots=True)
class EncodingRate:
    """One direction of one encoding. Owner: the thread that encodes, or decodes."""

    calibrated_byte_s: float
    _recent: deque[tuple[Instant, float]] = field(
        default_factory=lambda: deque(maxlen=NUM_REMEMBERED)
    )

    def add(self, num_bytes: int, seconds: float, now: Instant) -> None:
        """So many bytes of raw KV took so long, until now."""
        if num_bytes >= MIN_BYTES:
            self._recent.append((now, seconds / num_bytes))

    def byte_s(self, now: Instant) -> float:
        """Seconds for a byte of raw KV: the lower quartile of the latest uses, or as calibrated.

        Links are compared by their quickest transfers: a busy machine makes both slower.
        """
        fresh = sorted(byte_s for at, byte_s in self._recent if now - at <= FRESH_S)
        if not fresh:
            return self.calibrated_byte_s
        return max(MIN_BYTE_S, fresh[len(fresh) // 4])


@dataclass(frozen=True, slots=True)
class EncodingRates:
    """Both directions."""

    encode: EncodingRate
    decode: EncodingRate


def calibrate(encoding: KVEncoding, layout: KVLayout, clock: Clock) -> EncodingRates:
    """Encode and decode a MiB of KV of a layout in canonical order; the quickest counts."""
    blocks = make_reference_kv(layout, -(-CALIBRATION_BYTES // layout.block_bytes))
    encode_s, decode_s = [], []
    for _ in range(_NUM_ROUNDS):
        began_at = clock.now()
        encoded = encoding.encode(layout, blocks)
        encoded_at = clock.now()
        encoding.decode(layout, encoded, blocks)
        encode_s.append(encoded_at - began_at)
        decode_s.append(clock.now() - encoded_at)
    return EncodingRates(
        *(
            EncodingRate(max(MIN_BYTE_S, min(seconds) / blocks.nbytes))
            for seconds in (encode_s, decode_s)
        )
    )
