"""Which probes are made of a link, small ones first, and when it has been enough.

Probes use a buffer of their own: half of it holds a fixed pattern, half receives. Every worker's
pattern is the same, so a reader can check what it got. Page i of it is
`SHAKE-128("baton/scratch/1|" + u32 little-endian i)`, 4096 bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from xxhash import xxh3_128_digest

from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.links.cost_model import LinkModel, Sample, TransferShape, fit
from baton.transfer.region import allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.transfer.interface import DeviceAccess, PagedRegion

PAGE_BYTES: Final = 4096
NUM_PATTERN_PAGES: Final = 1024
NUM_PAGES: Final = 2 * NUM_PATTERN_PAGES
TARGET_PAGES: Final = np.arange(NUM_PATTERN_PAGES, NUM_PAGES, dtype=np.int64)
"""The pages of every scratch region that probes write."""
_SOURCE_STRIDE: Final = 29
_TARGET_STRIDE: Final = 37
"""Odd, and numbers of scattered pages are powers of two: each page comes once, none next to one."""


@dataclass(frozen=True, slots=True)
class ProbeBuffer:
    """One worker's scratch memory. Owner: the agent's thread."""

    region: PagedRegion

    @classmethod
    def allocate(cls, device: DeviceAccess | None = None) -> ProbeBuffer:
        """8 MiB, with the pattern in place; in the memory of a device, if there is one.

        Raises:
            TransferError: there is not that much memory.
        """
        allocate = allocate_shared_region if device is None else device.allocate
        buffer = cls(replace(allocate([(NUM_PAGES, PAGE_BYTES)]), is_public=True))
        buffer._write(0, _make_pattern())
        return buffer

    def try_take(self, num_pages: int, digest: bytes) -> bool:
        """Whether `num_pages` have landed with this digest; they are wiped, for the next probe."""
        if not 0 < num_pages <= NUM_PATTERN_PAGES:
            return False
        first_byte, num_bytes = NUM_PATTERN_PAGES * PAGE_BYTES, num_pages * PAGE_BYTES
        is_intact = xxh3_128_digest(self._read(first_byte, num_bytes)) == digest
        self._write(first_byte, bytes(num_bytes))
        return is_intact

    def _read(self, first_byte: int, num_bytes: int) -> bytes | memoryview:
        if self._access is None:
            return self.region.memory[first_byte : first_byte + num_bytes]
        return self._access.read(first_byte, num_bytes)

    def _write(self, first_byte: int, data: bytes) -> None:
        if self._access is None:
            self.region.memory[first_byte : first_byte + len(data)] = data
        else:
            self._access.write(first_byte, data)

    @property
    def _access(self) -> DeviceAccess | None:
        return None if self.region.device is None else self.region.device.access


def make_probe_copies(probe: Probe) -> PageCopies:
    """From pattern pages to landing pages: as one run, or each page apart from the next.

    On both sides: a transport may gather where it sends, scatter where it receives, or both.
    """
    source, target = _order_pages(probe)
    spans = np.array([[0, 0, probe.page_bytes]], dtype=np.int64)
    return PageCopies(0, (CopyGroup(source, TARGET_PAGES[target], spans),))


@cache
def compute_probe_digest(probe: Probe) -> bytes:
    """xxh3_128 of the landing pages, once the probe is there; what it leaves out of them is 0."""
    pattern = np.frombuffer(_make_pattern(), np.uint8).reshape(-1, PAGE_BYTES)[: probe.num_pages]
    source, target = _order_pages(probe)
    landed = np.zeros_like(pattern)
    landed[target, : probe.page_bytes] = pattern[source, : probe.page_bytes]
    return xxh3_128_digest(landed.data)


def _order_pages(probe: Probe) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which pages of the pattern go to which of the landing: permutations of `[0, num_pages)`."""
    pages = np.arange(probe.num_pages, dtype=np.int64)
    if not probe.is_scattered:
        return pages, pages
    return pages * _SOURCE_STRIDE % probe.num_pages, pages * _TARGET_STRIDE % probe.num_pages


@cache
def _make_pattern() -> bytes:
    return b"".join(
        hashlib.shake_128(b"baton/scratch/1|" + page.to_bytes(4, "little")).digest(PAGE_BYTES)
        for page in range(NUM_PATTERN_PAGES)
    )


_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Probe:
    """One transfer of scratch pages, or of the first `page_bytes` of each."""

    num_pages: int
    is_scattered: bool = False
    page_bytes: int = _PAGE_BYTES

    @property
    def shape(self) -> TransferShape:
        """What it moves."""
        num_descriptors = self.num_pages if self.is_scattered else 1
        return TransferShape(self.num_pages * self.page_bytes, num_descriptors)


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Probes, made in rounds: all of them, small ones first, and then again.

    Whatever else the machine does can only make a probe slower, and does so in bursts: what a link
    costs is what the quickest probe of a kind took, and two that agree confirm it.
    Rounds go on until that is so of every kind, within `least_rounds` and `most_rounds`.
    """

    probes: tuple[Probe, ...]
    least_rounds: int
    most_rounds: int


PLAN: Final = ProbePlan(
    (
        Probe(1),
        Probe(64),
        Probe(1),
        Probe(1024, is_scattered=True, page_bytes=256),
        Probe(1),
        Probe(1024),
        Probe(1024, is_scattered=True),
    ),
    least_rounds=3,
    most_rounds=12,
)
"""4 KiB, 256 KiB, 4 MiB: as one run, and in 1,024 pieces, whose cost is seen best where they are
small. Latency is what most differs from probe to probe, and costs least to ask. The first round
runs on cold ground."""

RECOVERY: Final = ProbePlan((Probe(1), Probe(64, is_scattered=True)), 1, 1)
"""Whether one that failed works again."""

AGREEMENT: Final = 0.1
"""The two quickest probes of a kind differ by no more, where nothing disturbed either."""


@dataclass(frozen=True, slots=True)
class ProbeBounds:
    """What probing all links with one peer may cost, in one direction."""

    seconds: float = 0.5
    num_bytes: int = 128 * 1024 * 1024

    def share(self, num_links: int) -> ProbeBounds:
        """Each link's part."""
        return ProbeBounds(self.seconds / num_links, self.num_bytes // num_links)


@dataclass(slots=True)
class ProbeSeries:
    """The probes of one link, one after the other. Pure.

    A probe that would probably leave the bounds is left out: on a slow link the small ones must do.
    The first one's time does not count: libraries connect when they are first used.
    """

    bounds: ProbeBounds
    prior: LinkModel
    plan: ProbePlan = PLAN
    samples: list[Sample] = field(default_factory=list)
    _round: Iterator[Probe] = field(default_factory=lambda: iter(()))
    _num_rounds: int = 0
    _num_at_start: int = 0
    _next: Probe | None = None

    def next(self) -> Probe | None:
        """The next probe, the same until it was `made`; None if it has been enough."""
        while self._next is None:
            probe = next(self._round, None)
            if probe is None:
                if not self._begin_round():
                    return None
            elif self._is_affordable(probe):
                self._next = probe
        return self._next

    def made(self, seconds: float) -> None:
        """The probe that `next` gave took so long."""
        if self._next is None:
            raise AssertionError("no probe was given")
        self.samples.append(Sample(self._next.shape, seconds))
        self._next = None

    @property
    def model(self) -> LinkModel:
        """What has been found out."""
        return fit(self._counting or self.samples, self.prior)

    @property
    def _counting(self) -> list[Sample]:
        return self.samples[1:]

    def _begin_round(self) -> bool:
        """Whether there is another one: not if the last one made nothing, or nothing is open."""
        was_idle = self._num_rounds > 0 and len(self.samples) == self._num_at_start
        is_settled = self._num_rounds >= self.plan.least_rounds and self._is_settled()
        if was_idle or is_settled or self._num_rounds == self.plan.most_rounds:
            return False
        self._num_rounds += 1
        self._num_at_start = len(self.samples)
        self._round = iter(self.plan.probes)
        return True

    def _is_settled(self) -> bool:
        """Whether of each kind that can still be made the two quickest agree."""
        times_of_open = map(self._times_of, filter(self._is_affordable, self.plan.probes))
        return all(
            len(times) > 1 and times[1] <= times[0] * (1 + AGREEMENT) for times in times_of_open
        )

    def _is_affordable(self, probe: Probe) -> bool:
        """By the quickest of its kind so far, or else by what the others took."""
        counting = self._counting
        if not counting:
            return True
        times = self._times_of(probe)
        expected_s = times[0] if times else self.model.predict(probe.shape)
        left_s = self.bounds.seconds - sum(sample.seconds for sample in counting)
        num_left = self.bounds.num_bytes - sum(s.shape.num_bytes for s in self.samples)
        return expected_s <= left_s and probe.shape.num_bytes <= num_left

    def _times_of(self, probe: Probe) -> list[float]:
        """Ascending."""
        return sorted(s.seconds for s in self._counting if s.shape == probe.shape)
