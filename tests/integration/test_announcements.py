"""Workers announce themselves to gateways over real connections; gateways exchange that."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.auth.certificates import IdentityRole
from baton.auth.credentials import Credentials
from baton.gateway.members.heartbeat_socket import Datagrams
from baton.gateway.members.heartbeat_table import Renewal
from baton.gateway.members.lease_table import MIN_INTERVAL_S, Lease
from baton.gateway.options import WorkerAddress
from baton.ids import WorkerId, new_epoch
from baton.net.cluster_client import ClusterClient, NoAnswerError
from baton.net.tls import ClusterTls
from baton.protocol.announcements import ANNOUNCEMENTS_PATH, EXCHANGES_PATH, seal_announcement
from baton.protocol.worker_http import Role
from baton.worker.announcer import SupersededError
from baton.worker.fence import Standing
from tests.free_ports import find_free_port
from tests.integration.announcing import (
    CLUSTER_KEY,
    KEY,
    LEASE_S,
    Gateway,
    Life,
    gateway,
    life,
)
from tests.integration.gateway_cluster import until
from tests.integration.identities import Identities

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator
    from pathlib import Path


@pytest.fixture
def silent_url() -> Generator[str]:
    """An address that takes connections and never answers, as a stopped process's does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"


def run(scenario: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(main())


async def until_serving(alive: Life) -> None:
    await until(lambda: alive.standing is Standing.SERVING)


def test_a_worker_is_known_while_it_announces_itself(silent_url: str) -> None:
    async def scenario() -> None:
        async with gateway() as one:
            watching = one.members.watch()
            assert await anext(watching) == frozenset()
            async with life("w", silent_url, one.url, role=Role.PREFILL) as alive:
                expected = frozenset({WorkerAddress(silent_url, Role.PREFILL)})
                assert await anext(watching) == expected
                await until_serving(alive)
                await asyncio.sleep(1.2 * LEASE_S)
                assert one.members.addresses() == expected, "its lease was not renewed"
                assert alive.standings == [Standing.SERVING]
            assert await anext(watching) == frozenset(), "its farewell was not taken"
            assert one.count("baton_gateway_ended_leases_total", cause="farewell") == 1

    run(scenario())


def test_one_that_ends_silently_is_known_to_be_gone(silent_url: str) -> None:
    async def scenario() -> None:
        async with gateway() as one:
            refusing = [f"https://127.0.0.1:{find_free_port()}" for _ in range(2)]
            async with (
                life("killed", refusing[0], one.url, takes_leave=False, lease_s=60.0) as killed,
                life("vanished", refusing[1], one.url, takes_leave=False) as vanished,
                life("stopped", silent_url, one.url, takes_leave=False) as stopped,
            ):
                for each in (killed, vanished, stopped):
                    await until_serving(each)
                killed.kill()  # its connection ends
            await until(lambda: one.epoch_of("killed") is None)
            await until(lambda: one.epoch_of("vanished") is None)  # its renewal is overdue
            assert one.epoch_of("stopped") == stopped.epoch, "a silent address may be alive"
            # More, where an announcement that was under way was taken once more.
            assert one.count("baton_gateway_ended_leases_total", cause="gone") >= 2
            await until(lambda: stopped.standing is Standing.FENCED, LEASE_S)
            assert one.epoch_of("stopped") == stopped.epoch, "it was taken out before its fence"
            await until(lambda: one.epoch_of("stopped") is None)
            assert one.count("baton_gateway_ended_leases_total", cause="lapsed") == 1

    run(scenario())


def test_a_second_life_waits_and_the_first_is_superseded(silent_url: str) -> None:
    async def scenario() -> None:
        async with gateway() as one, life("w", silent_url, one.url) as first:
            await until_serving(first)
            with socket.create_server(("127.0.0.1", 0)) as other:
                url = f"https://127.0.0.1:{other.getsockname()[1]}"
                async with life("w", url, one.url) as second:
                    await until(
                        lambda: one.count("baton_gateway_announcements_total", result="waiting")
                    )
                    assert second.standing is Standing.WAITING
                    assert one.epoch_of("w") == first.epoch
                    first.stop()
                    await until_serving(second)
                    assert first.standing is Standing.FENCED
                    assert one.epoch_of("w") == second.epoch
                    first.running = asyncio.create_task(first.announcer.run())
                    with pytest.raises(SupersededError, match=second.epoch):
                        await first.running
                    assert first.standings[-1] is Standing.SUPERSEDED
                    assert one.epoch_of("w") == second.epoch
                    assert second.standings == [Standing.SERVING]

    run(scenario())


def test_a_worker_that_restarted_at_its_address_need_not_wait() -> None:
    async def scenario() -> None:
        url = f"https://127.0.0.1:{find_free_port()}"  # refuses: the first life is gone
        async with gateway() as one:
            async with life("w", url, one.url, takes_leave=False, lease_s=60.0) as first:
                await until_serving(first)
            async with life("w", url, one.url, lease_s=60.0) as second:
                assert await until(lambda: second.standing is Standing.SERVING) < 5.0
                assert one.epoch_of("w") == second.epoch

    run(scenario())


def test_gateways_learn_from_each_other(silent_url: str) -> None:
    async def scenario() -> None:
        async with gateway() as one, life("w", silent_url, one.url, lease_s=30.0) as alive:
            await until_serving(alive)
            alive.stop()
            async with gateway(one.url) as two:
                learned_s = await until(lambda: two.epoch_of("w") == alive.epoch, 3.0)
                assert learned_s < 3.0
                leases = [each.members.table.find(WorkerId("w")) for each in (one, two)]
                ends = [lease.lapses_at for lease in leases if lease is not None]
                assert abs(ends[0] - ends[1]) < 0.5, "the age of what was relayed is not counted"
                # `two` has told `one` where it is, so that workers get to know it.
                await until(lambda: two.url in one.members._list_gateways())

    run(scenario())


def test_a_worker_learns_of_gateways_from_others(silent_url: str) -> None:
    async def scenario() -> None:
        async with gateway() as one, gateway(one.url) as two:
            await until(lambda: two.url in one.members._list_gateways())
            async with life("w", silent_url, one.url):
                await until(
                    lambda: two.count("baton_gateway_announcements_total", result="accepted")
                )
                assert not two.count("baton_gateway_refused_announcements_total", reason="repeated")

    run(scenario())


RENEWED = "baton_gateway_heartbeats_total"
RENEWAL_LEASE_S = 3.0
"""Shorter leases are renewed by posts alone."""


def test_leases_are_renewed_by_datagrams_and_posts_follow_those_that_are_lost(
    silent_url: str,
) -> None:
    async def renewed() -> None:
        async with (
            gateway() as one,
            life("w", silent_url, one.url, lease_s=RENEWAL_LEASE_S) as alive,
        ):
            await until(lambda: one.count(RENEWED, result="renewed") >= 2)
            assert alive.standings == [Standing.SERVING]
            await asyncio.sleep(2 * MIN_INTERVAL_S)  # after its own one
            check_that_a_renewal_is_of_its_sender(one)

    async def lost() -> None:
        """Datagrams do not reach the gateway: leases are renewed nevertheless."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            async with gateway() as one, life("w", url, one.url, lease_s=RENEWAL_LEASE_S) as alive:
                assert one.members.heartbeat_receiver is not None
                one.members.heartbeat_receiver._socket.read = lambda: Datagrams((), ())  # type: ignore[method-assign]
                (target,) = alive.announcer._gateways.values()
                await until(lambda: target.num_posts > 0)  # one was sent and lost
                await asyncio.sleep(0.9 * RENEWAL_LEASE_S)  # it is fenced after 0.8
                assert alive.standings == [Standing.SERVING]
                assert one.epoch_of("w") == alive.epoch
                assert not one.count(RENEWED, result="renewed")

    async def news() -> None:
        """A gateway that comes is known at the next post, and that is asked for at once."""
        async with gateway() as one, life("w", silent_url, one.url, lease_s=RENEWAL_LEASE_S):
            await until(lambda: one.count(RENEWED, result="renewed") >= 1)
            async with gateway(one.url) as two:
                took_s = await until(lambda: two.count(RENEWED, result="taken"))
                assert took_s < 3 * RENEWAL_LEASE_S, "not before the tenth announcement"

    async def scenario() -> None:
        await asyncio.gather(renewed(), lost(), news())  # at once: they wait for most of the time

    run(scenario())


def check_that_a_renewal_is_of_its_sender(one: Gateway) -> None:
    """No other worker, epoch or certificate gets a lease by a renewal under this one's key."""
    lease = one.members.table.find(WorkerId("w"))
    (sender,) = (each for each in one.members.heartbeats if each.worker == WorkerId("w"))
    assert isinstance(lease, Lease)
    held = msgspec.structs.replace(lease.announcement, sequence=10**6)
    author = Credentials.of(CLUSTER_KEY)
    another = dataclasses.replace(sender, certificate=author.signer.certificate)
    for sent_by, changed in (
        (another, msgspec.structs.replace(held, worker=WorkerId("other"), url="https://h:1")),
        (another, msgspec.structs.replace(held, epoch=new_epoch())),
        (another, msgspec.structs.replace(held, is_farewell=True)),
        (sender, held),  # sealed by `author`, whose certificate is not the sender's
    ):
        renewal = Renewal(sent_by, seal_announcement(changed, author))
        assert one.members.renew(renewal) is None
    assert one.members.table.find(WorkerId("other")) is None
    assert one.members.table.find(WorkerId("w")) is lease
    own = Renewal(another, seal_announcement(held, author))
    assert one.members.renew(own) is not None, "the four above were refused for another reason"


def test_who_may_send_what(tmp_path: Path) -> None:
    """Over TLS: workers announce themselves, gateways exchange; others get nowhere."""

    async def scenario() -> None:
        identities = Identities(tmp_path)
        worker, other = identities.of("worker", "w"), identities.of("gateway", "g2")
        async with gateway(credentials=identities.of("gateway", "g")) as one:

            async def post(credentials: Credentials, path: str) -> bytes:
                tls = ClusterTls(credentials)
                client = ClusterClient(one.url, IdentityRole.GATEWAY, tls, max_answer_bytes=1 << 16)
                try:
                    return await client.post(path, b"garbage", 2.0)
                finally:
                    client.close()

            assert b"refused" in await post(worker, ANNOUNCEMENTS_PATH)
            malformed = "baton_gateway_refused_announcements_total"
            assert one.count(malformed, reason="malformed") == 1
            for credentials, path in (
                (worker, EXCHANGES_PATH),
                (other, ANNOUNCEMENTS_PATH),
                (identities.of("monitor", "m"), ANNOUNCEMENTS_PATH),
                (worker, "/metrics"),
            ):
                with pytest.raises(NoAnswerError, match="403"):
                    await post(credentials, path)
            with pytest.raises(NoAnswerError, match="400"):
                await post(other, EXCHANGES_PATH)
            with pytest.raises(NoAnswerError):
                await post(KEY, ANNOUNCEMENTS_PATH)  # of another cluster

    run(scenario())
