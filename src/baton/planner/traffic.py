"""What KV is expected between workers, and how fast the links at each distance carry it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from baton.errors import ConfigError
from baton.kv.sizing.sizes import Terms, compute_sizes
from baton.planner.assignment import LEVELS
from baton.planner.sizing import DEMO, find_model
from baton.router.handoff_costs import DEFAULTS
from baton.router.topology import Distance

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.config.sections import FleetSection

DISTANCES: Final = (*(distance for distance, _ in LEVELS), Distance.CROSS_ZONE)
"""Between two workers of an assignment, from near to far: which devices they get is not known."""

RateSource: TypeAlias = Literal["configured", "measured", "default"]


class LinkRate(msgspec.Struct, frozen=True):
    """1e9 bytes of KV a second between two workers, one way, and what that rests on."""

    gb_per_s: float
    source: RateSource


class ExpectedKV(msgspec.Struct, frozen=True):
    """The KV of the prompts that are expected: of which model, how many, how long, how much."""

    model: str
    requests_per_s: float
    prompt_tokens: int
    bytes_per_s: float


def expect_kv(fleet: FleetSection, model: str | None) -> ExpectedKV:
    """The KV of the expected prompts. `model`: a config, a folder, a shipped name; None: the demo.

    Raises:
        ConfigError: there is no such model, or its KV is not understood.
    """
    shape, _ = find_model(model or DEMO)
    num_bytes = compute_sizes(shape, Terms(fleet.prompt_tokens)).needed_bytes
    rate = fleet.requests_per_s
    return ExpectedKV(model or DEMO, rate, fleet.prompt_tokens, rate * num_bytes)


def choose_rates(
    configured: Mapping[str, float], measured: Mapping[Distance, float]
) -> dict[Distance, LinkRate]:
    """GB/s for each distance: as configured, else as measured, else placement's default.

    Raises:
        ConfigError: a distance is configured that there is not.
    """
    names = {str(distance): distance for distance in DISTANCES}
    if unknown := configured.keys() - names.keys():
        raise ConfigError(
            f"fleet.links has {', '.join(sorted(unknown))}; distances are {', '.join(names)}"
        )
    rates = {}
    for name, distance in names.items():
        if name in configured:
            rates[distance] = LinkRate(configured[name], "configured")
        elif distance in measured:
            rates[distance] = LinkRate(measured[distance], "measured")
        else:
            rates[distance] = LinkRate(1e-9 / DEFAULTS[distance].byte_s, "default")
    return rates
