"""What several links would take for one shape, on an equal base.

Probes run on memory that caches hold, requests do not: for some shapes all links are slower than
surveyed, by much the same. Only the link that carries such transfers finds that out. Were it alone
corrected, it would lose to whichever link nobody has tried, and what the survey had right would be
unlearnt. So what one link taught is, up to a plausible misfit, expected of those that were not
tried; beyond that, it is that link's own.

What was learnt long ago (`freshness`) gives way to the probe: a link that was left in a burst of
load is not remembered as slow without limit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.transfer.links.model import LinkModel
    from baton.transfer.links.shape import TransferShape

MAX_COMMON: Final = math.log(1.3)
"""By how much the probes may be off for a shape, whichever the link."""


def compare(
    shape: TransferShape, models: Mapping[str, LinkModel], freshness: Mapping[str, float]
) -> dict[str, float]:
    """Seconds that each link is expected to take.

    `freshness[link]`, 0 to 1: how much of what it was taught for such shapes still counts.
    """
    kind = shape.size_class
    corrections: dict[str, tuple[float, float]] = {}
    sum_of_weights = common = 0.0
    for link, model in models.items():
        if not model.num_probes:
            continue
        learnt = model.correction(kind)
        log_ratio, trust = learnt.log_ratio, learnt.trust
        weight = trust * freshness[link]
        sum_of_weights += weight
        common += weight * log_ratio
        # One late transfer does not make a link a slow one: it may have waited for something else.
        corrections[link] = log_ratio, freshness[link] if trust == 1.0 else 0.0
    common = min(MAX_COMMON, max(-MAX_COMMON, common / (sum_of_weights or 1.0)))
    expected: dict[str, float] = {}
    for link, model in models.items():
        own, known = corrections.get(link, (0.0, 1.0))
        correction = known * own + (1 - known) * common
        expected[link] = model.predict_uncorrected(shape) * math.exp(correction)
    return expected
