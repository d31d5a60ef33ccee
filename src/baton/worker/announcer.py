"""Announces a worker to gateways, and fences it when none of them takes that in time.

    each lease / 3: sign once, send to every gateway ──accepted──► serve for the lease's length
                                                     └─superseded─► end: see `Announcer.run`
    each 0.25 s: a heartbeat to every gateway that has accepted it

An announcement is posted over TLS at first, and then each tenth time. The others are renewals:
datagrams, which the gateway acknowledges. One that is not acknowledged in time is posted.

Gateways that are not configured are learned from the replies of others.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.auth.certificates import IdentityRole
from baton.clock import Clock, Instant
from baton.errors import BatonError, ConfigError, ProtocolError
from baton.net.cluster_client import ClusterClient, NoAnswerError
from baton.net.tls import ClusterTls
from baton.protocol.announcements import (
    ANNOUNCEMENTS_PATH,
    MAX_GATEWAYS,
    RENEWALS_PER_LEASE,
    Announcement,
    AnnouncementReply,
    read_reply,
    require_https,
    seal_announcement,
)
from baton.protocol.heartbeats import HEARTBEAT_INTERVAL_S
from baton.telemetry.log_limit import LimitedLog
from baton.worker.fence import MembershipFence, Standing
from baton.worker.heartbeats import HeartbeatSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from baton.auth.credentials import Credentials

FAREWELL_TIMEOUT_S: Final = 1.0
MAX_REPLY_BYTES: Final = 64 << 10
MAX_FAILURES: Final = 30
"""In succession, after which a gateway that was learned is forgotten."""
RENEWALS_PER_POST: Final = 9
"""Renewals by datagrams between two posts; and posts after a renewal that was lost."""
MIN_RENEWAL_INTERVAL_S: Final = 1.0
"""More frequent announcements are posted: acknowledgements may take some tenths of a second."""
MIN_ACKNOWLEDGE_S: Final = 0.6

logger = logging.getLogger(__name__)


SUPERSEDED: Final = 76
"""Exit code of a worker whose name another epoch has: a supervisor must not restart it."""


class SupersededError(BatonError):
    """Another epoch has this worker's name: this one must not go on."""


@dataclass(slots=True, eq=False)
class _Gateway:
    """One gateway, and the post to it that is under way.

    `num_renewals`: so many may go by datagrams before the next post. `num_posts`: so many posts
    come before that, since a renewal was lost. `unacknowledged` is the sequence of a renewal.
    """

    client: ClusterClient
    is_configured: bool
    posting: asyncio.Task[None] | None = None
    num_failures: int = 0
    num_renewals: int = 0
    num_posts: int = 0
    unacknowledged: int | None = None

    @property
    def is_busy(self) -> bool:
        return self.posting is not None and not self.posting.done()


class Announcer:
    """Of one epoch of a worker. Owner: the event loop's thread.

    `template` is what is announced, with other numbers each time. `on_change` is called with each
    new standing.
    """

    def __init__(
        self,
        template: Announcement,
        gateways: Iterable[str],
        credentials: Credentials,
        *,
        clock: Clock,
        fence: MembershipFence,
        on_change: Callable[[Standing], None],
    ) -> None:
        self._template, self._credentials = template, credentials
        self._clock, self._fence = clock, fence
        self._on_change = on_change
        self._tls = ClusterTls(credentials)
        self._sequence, self._sealed = 0, b""
        self._interval_s = template.lease_s / RENEWALS_PER_LEASE
        self._acknowledge_s = max(MIN_ACKNOWLEDGE_S, self._interval_s / 3)
        self._news = asyncio.Event()
        self._log = LimitedLog(logger, clock)
        self._reported = fence.standing
        self._gateways: dict[str, _Gateway] = {}
        self._heartbeats = HeartbeatSender()
        for url in gateways:
            self._add(url, is_configured=True)

    async def run(self) -> None:
        """Announce until cancelled.

        Raises:
            SupersededError: another epoch has the name.
        """
        next_at = heartbeat_at = post_at = self._clock.now()
        while True:
            now = self._clock.now()
            self._read_acknowledgements(now)
            if self._report(self._fence.look(now)) is Standing.SUPERSEDED:
                raise SupersededError(
                    f"{self._template.worker} runs elsewhere: its name was given to epoch "
                    f"{self._fence.superseded_by} while this one, {self._template.epoch}, did not "
                    "renew its lease; this process ends, and must not be started again beside it"
                )
            if now >= next_at:
                self._announce(now)
                next_at = Instant(now + self._interval_s)
                post_at = Instant(now + self._acknowledge_s)
            if now >= post_at:
                self._post_unacknowledged()
            if now >= heartbeat_at:
                self._heartbeats.send()
                heartbeat_at = Instant(now + HEARTBEAT_INTERVAL_S)
            is_serving = self._fence.standing is Standing.SERVING
            wake_at = min(next_at, heartbeat_at, self._fence.until if is_serving else next_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wake_at - self._clock.now())):
                    await self._news.wait()
            self._news.clear()

    async def leave(self) -> None:
        """Report the end of this epoch to every gateway, once; close all connections."""
        self._heartbeats.close()
        posting = [each.posting for each in self._gateways.values() if each.posting is not None]
        for task in posting:
            task.cancel()
        await asyncio.gather(*posting, return_exceptions=True)
        self._sequence += 1
        farewell = self._seal(is_farewell=True)
        posts = (
            gateway.client.post(ANNOUNCEMENTS_PATH, farewell, FAREWELL_TIMEOUT_S)
            for gateway in self._gateways.values()
        )
        await asyncio.gather(*posts, return_exceptions=True)
        for gateway in self._gateways.values():
            gateway.client.close()

    def _report(self, standing: Standing) -> Standing:
        if standing is not self._reported:
            self._reported = standing
            self._on_change(standing)
        return standing

    def _announce(self, now: Instant) -> None:
        """Send the next announcement to each gateway that has answered the one before."""
        self._sequence += 1
        self._sealed = self._seal(is_farewell=False)
        self._fence.sent(self._sequence, now)
        for gateway in self._gateways.values():
            if not (gateway.is_busy or self._renew(gateway)):
                self._begin_post(gateway)

    def _renew(self, gateway: _Gateway) -> bool:
        """Send the announcement by a datagram, if that may be done now."""
        is_due = gateway.num_renewals > 0 and self._interval_s >= MIN_RENEWAL_INTERVAL_S
        # A connection that has ended may be the gateway's end: another one knows no grant.
        if not (is_due and gateway.client.is_connected):
            return False
        if not self._heartbeats.send_renewal(gateway.client.url, self._sealed):
            return False
        gateway.num_renewals -= 1
        gateway.unacknowledged = self._sequence
        return True

    def _read_acknowledgements(self, now: Instant) -> None:
        for url, acknowledgement in self._heartbeats.read_acknowledgements():
            gateway, sequence = self._gateways[url], acknowledgement.sequence
            self._fence.accepted(sequence, now)
            if gateway.unacknowledged == sequence:
                gateway.unacknowledged = None
            if acknowledgement.asks_for_post:
                gateway.num_renewals = 0

    def _post_unacknowledged(self) -> None:
        """Post what was lost on the way, or was not accepted: the answer gives the reason."""
        for gateway in self._gateways.values():
            if gateway.unacknowledged is not None and not gateway.is_busy:
                gateway.num_posts = RENEWALS_PER_POST
                self._begin_post(gateway)

    def _begin_post(self, gateway: _Gateway) -> None:
        gateway.unacknowledged = None
        gateway.num_posts = max(0, gateway.num_posts - 1)
        gateway.num_renewals = 0 if gateway.num_posts else RENEWALS_PER_POST
        post = self._post(gateway, self._sealed, self._sequence)
        gateway.posting = asyncio.create_task(post)

    def _seal(self, *, is_farewell: bool) -> bytes:
        announcement = msgspec.structs.replace(
            self._template, sequence=self._sequence, is_farewell=is_farewell
        )
        return seal_announcement(announcement, self._credentials)

    async def _post(self, gateway: _Gateway, sealed: bytes, sequence: int) -> None:
        try:
            # A little less than the interval, so that the next one finds it free.
            body = await gateway.client.post(ANNOUNCEMENTS_PATH, sealed, 0.9 * self._interval_s)
            reply = read_reply(body)
        except (NoAnswerError, ProtocolError) as exc:
            gateway.num_failures += 1
            self._log.warning("gateway", f"announced to no effect: {exc}")
            if not gateway.is_configured and gateway.num_failures >= MAX_FAILURES:
                gateway.client.close()
                del self._gateways[gateway.client.url]
                self._heartbeats.remove(gateway.client.url)
            return
        gateway.num_failures = 0
        self._take(gateway, reply, sequence)

    def _take(self, gateway: _Gateway, reply: AnnouncementReply, sequence: int) -> None:
        for url in reply.gateways:
            self._learn(url)
        url, name = gateway.client.url, self._template.worker
        match reply.result:
            case "accepted":
                self._fence.accepted(sequence, self._clock.now())
                if reply.heartbeat is not None and gateway.client.peer is not None:
                    self._heartbeats.add(url, reply.heartbeat, gateway.client.peer)
            case "superseded":
                self._fence.superseded(reply.owner)
            case "waiting":
                self._log.warning(
                    "waiting",
                    f"{url}: the name {name} is another epoch's ({reply.owner}) for up to "
                    f"{reply.wait_s:.1f} s more: {reply.reason}",
                )
            case "refused":
                self._log.warning("refused", f"{url} refuses {name}: {reply.reason}")
        self._news.set()

    def _learn(self, url: str) -> None:
        url = url.rstrip("/")
        if url in self._gateways or len(self._gateways) >= MAX_GATEWAYS:
            return
        with suppress(ConfigError):
            require_https("a gateway's reply", (url,))
            logger.info("announcing to %s too, which another gateway knows", url)
            self._begin_post(self._add(url, is_configured=False))

    def _add(self, url: str, *, is_configured: bool) -> _Gateway:
        url = url.rstrip("/")
        client = ClusterClient(
            url, IdentityRole.GATEWAY, self._tls, max_answer_bytes=MAX_REPLY_BYTES
        )
        gateway = self._gateways[url] = _Gateway(client, is_configured)
        return gateway
