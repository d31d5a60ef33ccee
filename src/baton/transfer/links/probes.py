"""Which probes are made of a link, small ones first, and when it has been enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.transfer.links.fitting import Sample, fit
from baton.transfer.links.shape import TransferShape

if TYPE_CHECKING:
    from baton.transfer.links.model import LinkModel

_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Probe:
    """One transfer of scratch pages."""

    num_pages: int
    is_scattered: bool = False

    @property
    def shape(self) -> TransferShape:
        """What it moves."""
        num_descriptors = self.num_pages if self.is_scattered else 1
        return TransferShape(self.num_pages * _PAGE_BYTES, num_descriptors)


PLAN: Final = (
    Probe(1),
    Probe(1),
    Probe(1),
    Probe(1),
    Probe(64),
    Probe(64, is_scattered=True),
    Probe(64),
    Probe(64, is_scattered=True),
    Probe(1024),
    Probe(1024, is_scattered=True),
    Probe(1024),
    Probe(1024, is_scattered=True),
)
"""4 KiB, 256 KiB, 4 MiB. Half of them run on cold ground: a fit is deaf to those."""

RECOVERY: Final = (Probe(1), Probe(64, is_scattered=True))
"""Whether one that failed works again."""


@dataclass(frozen=True, slots=True)
class ProbeBounds:
    """What surveying all links with one peer may cost, in one direction."""

    seconds: float = 0.15
    num_bytes: int = 32 * 1024 * 1024

    def share(self, num_links: int) -> ProbeBounds:
        """Each link's part."""
        return ProbeBounds(self.seconds / num_links, self.num_bytes // num_links)


@dataclass(slots=True)
class ProbeSeries:
    """The probes of one link, one after the other. Pure.

    A probe that would probably leave the bounds is not made, nor any after it: on a slow link the
    small ones must do.
    """

    bounds: ProbeBounds
    prior: LinkModel
    plan: tuple[Probe, ...] = PLAN
    samples: list[Sample] = field(default_factory=list)
    _num_made: int = 0

    def next(self) -> Probe | None:
        """The next probe; None if it has been enough."""
        if self._num_made == len(self.plan):
            return None
        probe = self.plan[self._num_made]
        left_s = self.bounds.seconds - sum(sample.seconds for sample in self.samples)
        num_left = self.bounds.num_bytes - sum(s.shape.num_bytes for s in self.samples)
        expected_s = self.model.predict(probe.shape)
        if self.samples and (expected_s > left_s or probe.shape.num_bytes > num_left):
            return None
        return probe

    def made(self, seconds: float) -> None:
        """The probe that `next` gave took so long."""
        probe = self.plan[self._num_made]
        self._num_made += 1
        self.samples.append(Sample(probe.shape, seconds))

    @property
    def model(self) -> LinkModel:
        """What has been found out."""
        return fit(self.samples, self.prior)
