"""A port scan, and attacks on real processes: others are served, it is logged and counted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.abuse.attacks import ATTACKS, Attack
from tests.abuse.victims import HonestClient, Victims, running_victims, until_memory_is_back
from tests.port_scan import check_refusals, find_listeners

if TYPE_CHECKING:
    from collections.abc import Iterator

FALLBACKS = "baton_gateway_fallbacks_total"
COUNTED_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    with running_victims(tmp_path_factory.mktemp("logs")) as running:
        yield running


def test_strangers_are_refused_at_every_listener(victims: Victims) -> None:
    """A port scan of a fleet that runs."""
    listeners = find_listeners(*victims.workers)
    # HTTP, handoffs and pages of both, and the sockets of `shared`.
    assert len(listeners) == 8, listeners
    check_refusals(listeners)
    (gateway,) = find_listeners(victims.gateway)
    assert gateway.address == victims.addresses.gateway_port


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_others_are_served_and_nothing_is_left(victims: Victims, attack: Attack) -> None:
    asyncio.run(_check(victims, attack))


async def _check(victims: Victims, attack: Attack) -> None:
    honest = HonestClient(victims.gateway.url)
    await honest.ask()
    before = victims.read_rss_bytes()
    num_counted = await victims.read_metric(attack.victim, attack.counted)
    num_fallbacks = await victims.read_metric("gateway", FALLBACKS)
    attacking = asyncio.create_task(attack.run(victims.addresses))  # type: ignore[arg-type]
    num_honest = 0
    while not attacking.done():
        await honest.ask()
        num_honest += 1
        await asyncio.sleep(0.05)
    await attacking
    assert num_honest > 0
    await until_memory_is_back(victims, before)
    await honest.ask()
    if attack.victim != "gateway":  # a bad request may be refused by prefill first, and counts
        assert await victims.read_metric("gateway", FALLBACKS) == num_fallbacks
    # Both come some time after the attackers' connections have ended.
    log = victims.find(attack.victim).log
    async with asyncio.timeout(COUNTED_WITHIN_S):
        while await victims.read_metric(attack.victim, attack.counted) <= num_counted:
            await asyncio.sleep(0.05)
        while attack.log not in log.read_text():
            await asyncio.sleep(0.05)
