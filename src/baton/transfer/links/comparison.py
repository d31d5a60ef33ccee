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
    corrected = {link: model.correction(kind) for link, model in models.items() if model.num_probes}
    weights = {link: each.trust * freshness[link] for link, each in corrected.items()}
    common = sum(weights[link] * each.log_ratio for link, each in corrected.items())
    common = min(MAX_COMMON, max(-MAX_COMMON, common / (sum(weights.values()) or 1.0)))
    # One late transfer does not make a link a slow one: it may have waited for something else.
    trust = {
        link: freshness[link] if each.trust == 1.0 else 0.0 for link, each in corrected.items()
    }
    expected: dict[str, float] = {}
    for link, model in models.items():
        known = trust.get(link, 1.0)
        own = corrected[link].log_ratio if link in corrected else 0.0
        correction = known * own + (1 - known) * common
        expected[link] = model.predict_uncorrected(shape) * math.exp(correction)
    return expected
