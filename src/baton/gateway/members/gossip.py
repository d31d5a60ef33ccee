"""Gateways exchange the announcements that they have. All gateways are alike; none leads.

    each second, with two peers:  what I know ─►  ◄─ what I lack, and what you lack
                                  that ─►

Workers announce to every gateway, so that an exchange finds nothing missing as a rule. It is for a
gateway that has just started, or that some workers do not reach.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final

import msgspec

from baton.auth.certificates import IdentityRole
from baton.errors import ProtocolError
from baton.net.cluster_client import ClusterClient, NoAnswerError
from baton.protocol.announcements import (
    EXCHANGES_PATH,
    MAX_EXCHANGE_BYTES,
    MAX_GATEWAYS,
    MAX_RELAYED,
    Exchange,
    ExchangeReply,
    read_exchange,
    read_exchange_reply,
)
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.clock import Clock, Instant
    from baton.gateway.members.announced import AnnouncedWorkers
    from baton.gateway.members.announced_metrics import AnnouncementMetrics
    from baton.net.tls import ClusterTls

INTERVAL_S: Final = 1.0
NUM_PEERS: Final = 2
TIMEOUT_S: Final = 1.0
FORGET_S: Final = 60.0
"""A gateway that is not configured, and has not been in contact for so long, is forgotten."""
MAX_ROUNDS: Final = 1 + 20
"""Of one exchange: each has as many announcements as a message may have."""

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class Peers:
    """The other gateways: configured ones, and those that have been in contact."""

    def __init__(self, own: str, configured: Iterable[str]) -> None:
        self.own = own
        self._configured = dict.fromkeys(
            url.rstrip("/") for url in configured if url.rstrip("/") != own
        )
        self._learned: dict[str, Instant] = {}

    def note(self, url: str, now: Instant) -> None:
        """A gateway that is to be reached at `url` has been in contact."""
        url = url.rstrip("/")
        is_known = url in self._configured or url == self.own
        has_room = url in self._learned or len(self.all()) < MAX_GATEWAYS - 1
        if url.startswith("https://") and not is_known and has_room:
            self._learned[url] = now

    def forget_old(self, now: Instant) -> None:
        """Forget those that were learned and are gone."""
        for url in [url for url, seen in self._learned.items() if now - seen > FORGET_S]:
            del self._learned[url]

    def all(self) -> tuple[str, ...]:
        """Their URLs."""
        return (*self._configured, *self._learned)

    def with_own(self) -> tuple[str, ...]:
        """All gateways, this one too, as workers and gateways get to know them."""
        return (self.own, *self.all())[:MAX_GATEWAYS]


class Gossip:
    """Exchanges with peers, on both sides. Owner: the event loop's thread."""

    def __init__(
        self,
        members: AnnouncedWorkers,
        peers: Peers,
        tls: ClusterTls,
        *,
        clock: Clock,
        metrics: AnnouncementMetrics,
    ) -> None:
        self._members, self._peers, self._tls = members, peers, tls
        self._clock, self._metrics = clock, metrics
        self._clients: dict[str, ClusterClient] = {}
        self._log = LimitedLog(log, clock)
        self._random = random.Random()  # noqa: S311 - which peer is asked is no secret

    async def run(self) -> None:
        """Learn from a peer at first, then exchange with some each second, until cancelled."""
        try:
            await self._learn()
            while True:
                await asyncio.sleep(INTERVAL_S * self._random.uniform(0.9, 1.1))
                peers = self._find_peers()
                chosen = self._random.sample(peers, min(NUM_PEERS, len(peers)))
                await asyncio.gather(*map(self._exchange, chosen))
        finally:
            for client in self._clients.values():
                client.close()

    async def answer(self, body: bytes) -> bytes:
        """Another gateway's `Exchange`: the `ExchangeReply`.

        Raises:
            ProtocolError: it does not decode.
        """
        exchange = read_exchange(body)
        if exchange.gateway is not None:
            self._peers.note(exchange.gateway, self._clock.now())
        await self._members.take_relayed(exchange.relayed)
        if exchange.known is None:
            return _encode(ExchangeReply())
        relayed, wanted = self._members.table.compare(exchange.known, self._members.now())
        return _encode(ExchangeReply(relayed=tuple(relayed), wanted=tuple(wanted)))

    def _find_peers(self) -> tuple[str, ...]:
        """All peers; of those that are forgotten no connection is kept."""
        self._peers.forget_old(self._clock.now())
        peers = self._peers.all()
        for url in [url for url in self._clients if url not in peers]:
            self._clients.pop(url).close()
        return peers

    async def _learn(self) -> None:
        """Ask peers until one has answered: it knows what all know."""
        peers = self._random.sample(self._peers.all(), len(self._peers.all()))
        for i in range(0, len(peers), NUM_PEERS):
            if any(await asyncio.gather(*map(self._exchange, peers[i : i + NUM_PEERS]))):
                return

    async def _exchange(self, url: str) -> bool:
        """Whether the peer answered."""
        try:
            await self._talk(url)
        except (NoAnswerError, ProtocolError) as exc:
            self._metrics.exchanged(is_ok=False)
            self._log.warning("peer", f"no exchange of announcements with a gateway: {exc}")
        except Exception:
            self._metrics.exchanged(is_ok=False)
            log.exception("exchanging announcements with %s failed; trying again", url)
        else:
            self._metrics.exchanged(is_ok=True)
            return True
        return False

    async def _talk(self, url: str) -> None:
        """Exchange until both know the same, as far as one message after the other can do it."""
        members = self._members
        for _ in range(MAX_ROUNDS):
            reply = await self._ask(
                url, Exchange(gateway=self._peers.own, known=members.table.known())
            )
            num_accepted = await members.take_relayed(reply.relayed)
            if reply.wanted:
                relayed = tuple(members.table.relay(reply.wanted, members.now()))
                await self._ask(url, Exchange(relayed=relayed))
            if len(reply.relayed) < MAX_RELAYED or not num_accepted:
                return

    async def _ask(self, url: str, exchange: Exchange) -> ExchangeReply:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = ClusterClient(
                url, IdentityRole.GATEWAY, self._tls, max_answer_bytes=MAX_EXCHANGE_BYTES
            )
        body = await client.post(EXCHANGES_PATH, _encode(exchange), TIMEOUT_S)
        return read_exchange_reply(body)
