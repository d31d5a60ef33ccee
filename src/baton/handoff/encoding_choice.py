"""How a handoff's KV is encoded, if at all: as it arrives soonest, by measured rates. Pure.

The decode worker, which grants the pages, compares bytes alone (`EncodingChooser`):

    raw:                          num_bytes x link
    each encoding that both have: num_bytes x (encode + encoded_share x link + decode)

Encoding, sending and decoding overlap in part, which is not counted: where they do, encoding gains
more than is predicted. What both pay alike (latency, digests) is left out. One must be 10 % quicker
than the one used last to replace it: noise of some percent does not change the encoding.

The prefill worker, which knows what it has yet to compute, compares when all would be there
(`predict_arrival`): KV that is computed layer by layer travels while the next layer is computed,
and an encoder takes its time from the processor that computes.

    raw:      compute 1 | compute 2   | compute 3   |
                        | link 1      | link 2      | link 3      |
    encoded:  compute 1 | encode 1 | compute 2 | encode 2 | compute 3 | encode 3 | link 3 | decode 3
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.encodings.interface import RAW
from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MARGIN: Final = 0.1
MIN_PASS_TOKENS: Final = 64
"""Computed for one prompt: the time of fewer does not show what a token takes."""
NUM_PASSES: Final = 11


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

    chosen: str = RAW

    def choose(self, byte_s: Mapping[str, float]) -> str:
        """The encoding of the next handoff, raw included, of those that it may have.

        `byte_s`: seconds for a byte of raw KV, by encoding; with that of raw itself.
        """
        if self.chosen not in byte_s:
            self.chosen = RAW
        quickest = min(byte_s, key=lambda each: byte_s[each])
        if byte_s[quickest] < byte_s[self.chosen] * (1 - MARGIN):
            self.chosen = quickest
        return self.chosen


class KVToSend(Record, frozen=True):
    """Raw KV of one handoff: bytes that are computed, and bytes that prefill has yet to compute.

    The latter become ready in `num_parts` equal parts, one after the other, over `prefill_s`.
    """

    ready_bytes: float
    rest_bytes: float
    prefill_s: float
    num_parts: int


class Arrival(Record, frozen=True):
    """Seconds from now until all KV of a handoff is there, raw and encoded."""

    raw_s: float
    encoded_s: float


def predict_arrival(costs: LinkEncodingCosts, kv: KVToSend) -> Arrival:
    """When all of it is there. What is ready counts as one part: it is sent, then decoded."""
    part_s, part_bytes = kv.prefill_s / kv.num_parts, kv.rest_bytes / kv.num_parts
    parts = [(0.0, kv.ready_bytes)] + [(part_s, part_bytes)] * kv.num_parts
    link_byte_s, sent_byte_s = costs.link_byte_s, costs.encoded_share * costs.link_byte_s
    return Arrival(
        raw_s=_run_stages((part_s, size * link_byte_s) for part_s, size in parts),
        encoded_s=_run_stages(
            (part_s + size * costs.encode_byte_s, size * sent_byte_s, size * costs.decode_byte_s)
            for part_s, size in parts
        ),
    )


def choose_arrival(kv: KVToSend, arrivals: Mapping[str, Arrival], granted: str) -> str:
    """How KV is to go, raw included, for which `granted` was chosen by its bytes alone.

    By encoding: when it would be there. As it is granted where prefill takes less than the margin:
    there the choice by bytes is as good; and where no other is sooner by the margin.
    """
    quickest = min(arrivals, key=lambda each: arrivals[each].encoded_s)
    soonest_s, raw_s = arrivals[quickest].encoded_s, arrivals[quickest].raw_s
    if kv.prefill_s < MARGIN * raw_s:
        return granted
    if soonest_s > raw_s * (1 - MARGIN):
        return RAW
    return quickest if soonest_s < arrivals[granted].encoded_s * (1 - MARGIN) else granted


def _run_stages(parts: Iterable[tuple[float, ...]]) -> float:
    """When the last part leaves the last stage.

    A part takes so long in each stage, in order; a stage has one part at a time.
    """
    free_at: list[float] = []
    for part in parts:
        free_at = free_at or [0.0] * len(part)
        at = 0.0
        for stage, takes_s in enumerate(part):
            at = free_at[stage] = max(at, free_at[stage]) + takes_s
    return free_at[-1]


@dataclass(slots=True)
class PrefillDurations:
    """What this worker's engine took for prompts, from the offer of a handoff until it was done.

    Waiting among other prompts is in it: KV can travel meanwhile. Owner: the agent's thread.
    """

    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PASSES))

    def add(self, num_tokens: int, seconds: float) -> None:
        """So many tokens, of one prompt, took so long."""
        if num_tokens >= MIN_PASS_TOKENS:
            self._token_s.append(seconds / num_tokens)

    def predict_s(self, num_tokens: float) -> float | None:
        """Seconds for so many tokens, by the median of the latest prompts; None before any."""
        if not self._token_s:
            return None
        return statistics.median(self._token_s) * num_tokens
