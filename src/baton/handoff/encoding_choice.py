"""Whether a handoff's KV is encoded: where it then arrives sooner, by measured rates. Pure.

    raw:      num_bytes x link
    encoded:  num_bytes x (encode + encoded_share x link + decode)

Encoding, sending and decoding overlap in part, which is not counted: where they do, encoding gains
more than is predicted. What both pay alike (latency, digests) is left out. One must be 10 % quicker
than the one used last to replace it: noise of some percent does not change the encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.record import Record

MARGIN: Final = 0.1


class LinkEncodingCosts(Record, frozen=True):
    """Seconds for a byte: on the link, and to encode and to decode a byte of raw KV.

    `encoded_share` are encoded bytes for each raw one.
    """

    link_byte_s: float
    encode_byte_s: float
    decode_byte_s: float
    encoded_share: float

    @property
    def encoded_byte_s(self) -> float:
        """Seconds for a byte of raw KV that is encoded, sent and decoded."""
        return self.encode_byte_s + self.encoded_share * self.link_byte_s + self.decode_byte_s


@dataclass(slots=True)
class EncodingChooser:
    """Chooses for one link in one direction; begins with raw KV."""

    is_encoded: bool = False

    def choose(self, costs: LinkEncodingCosts) -> bool:
        """Whether the next handoff's KV is to be encoded."""
        raw_s, encoded_s = costs.link_byte_s, costs.encoded_byte_s
        if self.is_encoded:
            self.is_encoded = raw_s > encoded_s * (1 - MARGIN)
        else:
            self.is_encoded = encoded_s < raw_s * (1 - MARGIN)
        return self.is_encoded
