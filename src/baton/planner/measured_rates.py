"""How fast a running fleet's links are, by distance, from its gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.errors import UNDECODABLE, ConfigError
from baton.ops.gateway_pages import OK, Gateway, read_refusal
from baton.planner.traffic import DISTANCES
from baton.protocol.gateway_http import LINKS_PATH

if TYPE_CHECKING:
    from baton.router.topology import Distance


class _HandoffLine(msgspec.Struct, frozen=True):
    distance: str
    link_bytes_per_s: float | None


class _ModelLinks(msgspec.Struct, frozen=True):
    model: str
    handoffs: tuple[_HandoffLine, ...]


class _LinkList(msgspec.Struct, frozen=True):
    models: tuple[_ModelLinks, ...]


def read_rates(gateway: Gateway) -> dict[Distance, float]:
    """GB/s of KV at each distance whose links a running fleet's workers have measured.

    With several models, the slowest of each distance.

    Raises:
        PageError: the gateway does not answer.
        ConfigError: its answer is not a list of links, or no link was measured yet.
    """
    status, body = gateway.get(LINKS_PATH)
    if status != OK:
        raise ConfigError(f"{gateway.url}{LINKS_PATH} answered {status}: {read_refusal(body)}")
    try:
        found = msgspec.json.decode(body, type=_LinkList)
    except UNDECODABLE as exc:
        raise ConfigError(f"{gateway.url}{LINKS_PATH} does not decode: {exc}") from exc
    rates: dict[Distance, float] = {}
    names = {str(distance): distance for distance in DISTANCES}
    for line in (line for model in found.models for line in model.handoffs):
        distance = names.get(line.distance)
        if distance is not None and line.link_bytes_per_s:
            rate = line.link_bytes_per_s / 1e9
            rates[distance] = min(rate, rates.get(distance, rate))
    if not rates:
        raise ConfigError(
            f"{gateway.url}: no workers of this fleet have measured a link yet: they do so before "
            "their first handoff"
        )
    return rates
