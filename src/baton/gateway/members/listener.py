"""Where a gateway takes announcements: a listener of its own, for workers and gateways alone.

TLS with certificates on both sides, as between gateway and workers. Clients never reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

import msgspec
import uvicorn

from baton.auth.certificates import IdentityRole
from baton.errors import AuthenticationError, BatonError, InvalidRequestError, ProtocolError
from baton.gateway.asgi import BodyBudget, BodyLimit, read_body, send_error, send_whole
from baton.gateway.errors import PathNotFoundError, answer_for
from baton.gateway.members.announced import AnnouncedWorkers
from baton.gateway.members.announced_metrics import AnnouncementMetrics
from baton.gateway.members.gossip import Gossip, Peers
from baton.gateway.members.heartbeat_receiver import HeartbeatReceiver
from baton.gateway.members.heartbeat_socket import HeartbeatSocket
from baton.net.http_exchange import EXTENSION
from baton.net.http_limits import Connections, HttpLimits, Refusal, allow_descriptors
from baton.net.http_server import bind, count_refusals, make_server_config, start_listening, url_of
from baton.net.tls import ClusterTls
from baton.protocol.announcements import (
    ANNOUNCEMENTS_PATH,
    EXCHANGES_PATH,
    MAX_ANNOUNCEMENT_BYTES,
    MAX_EXCHANGE_BYTES,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Callable

    from prometheus_client import CollectorRegistry
    from starlette.types import Receive, Scope, Send

    from baton.auth.credentials import Credentials
    from baton.clock import Clock
    from baton.gateway.options import GatewayOptions
    from baton.net.http_protocol import BoundedHttpProtocol

LIMITS: Final = HttpLimits(max_connections_per_address=4096)
"""Workers keep a connection each; one that waits gives its place to another that needs it."""
MAX_TOTAL_BODY_BYTES: Final = 64 << 20
MSGPACK: Final = (b"content-type", b"application/msgpack")

_ROLES: Final = {
    ANNOUNCEMENTS_PATH: IdentityRole.WORKER,
    EXCHANGES_PATH: IdentityRole.GATEWAY,
}

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class MembershipTls:
    """Implements `HttpTls`: workers may announce, gateways may exchange, and nothing else."""

    def __init__(self, credentials: Credentials, tls: ClusterTls) -> None:
        self._credentials, self._tls = credentials, tls

    @property
    def listening(self) -> ssl.SSLContext:
        """See `HttpTls`."""
        return self._tls.listening

    def check_request(self, certificate: bytes | None, method: str, path: str) -> bool:
        """See `HttpTls`."""
        peer = self._credentials.find_peer(certificate or b"")
        role = _ROLES.get(path)
        if method != "POST" or role is None or role not in peer.roles:
            raise AuthenticationError(f"{peer} may not {method} {path[:200]} here")
        return role is IdentityRole.GATEWAY


class WorkerConnections(Connections):
    """The connections of the listener: the end of one may be that of its worker."""

    def __init__(
        self,
        clock: Clock,
        on_refused: Callable[[Refusal], None],
        tls: MembershipTls,
        on_ended: Callable[[bytes], None],
    ) -> None:
        super().__init__(allow_descriptors(LIMITS), clock, on_refused, tls)
        self._on_ended = on_ended

    def leave(self, connection: BoundedHttpProtocol) -> None:
        """See `Connections`."""
        super().leave(connection)
        if connection.peer_certificate is not None:
            self._on_ended(connection.peer_certificate)


class MembershipApp:
    """An ASGI application, on Baton's server alone."""

    def __init__(self, members: AnnouncedWorkers, gossip: Gossip) -> None:
        self._members, self._gossip = members, gossip
        self._budget = BodyBudget(MAX_TOTAL_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        try:
            answer = await self._answer(scope, receive)
        except BatonError as exc:
            await send_error(send, answer_for(exc))
        except Exception as exc:
            log.exception("%s failed", scope["path"])
            await send_error(send, answer_for(exc))
        else:
            await send_whole(send, 200, answer, (MSGPACK,))

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        path: str = scope["path"]
        if path == ANNOUNCEMENTS_PATH:
            body = await self._read(receive, MAX_ANNOUNCEMENT_BYTES)
            sender: bytes = scope["extensions"][EXTENSION].peer_certificate or b""
            return _encode(await self._members.receive(body, sender))
        if path == EXCHANGES_PATH:
            try:
                return await self._gossip.answer(await self._read(receive, MAX_EXCHANGE_BYTES))
            except ProtocolError as exc:
                raise InvalidRequestError(str(exc), code="invalid_value") from exc
        raise PathNotFoundError(f"{path[:200]} does not exist here")

    async def _read(self, receive: Receive, max_bytes: int) -> bytes:
        with self._budget.hold() as held:
            return await read_body(receive, BodyLimit(max_bytes, lambda: max_bytes), held)


@contextlib.asynccontextmanager
async def open_announcements(
    options: GatewayOptions, clock: Clock, registry: CollectorRegistry
) -> AsyncGenerator[AnnouncedWorkers | None]:
    """The source `announced`, its listener and its exchanges, for as long as the block runs.

    None where `announce_port` is not configured.

    Raises:
        ConfigError: the port is taken, by TCP or UDP.
    """
    if options.announce_port is None:
        yield None
        return
    credentials = options.credentials
    tls, metrics = ClusterTls(credentials), AnnouncementMetrics(registry)
    host = options.announce_host
    with (
        contextlib.closing(bind(host, options.announce_port)) as listener,
        contextlib.closing(HeartbeatSocket(host, listener.getsockname()[1])) as heartbeats,
    ):
        own = options.announce_url or url_of(listener, host, is_tls=True)
        own = own.rstrip("/")
        peers = Peers(own, options.peers)
        members = AnnouncedWorkers(
            credentials,
            tls,
            clock,
            metrics,
            takes_plain=options.tls == "off",
            list_gateways=peers.with_own,
        )
        members.heartbeat_receiver = HeartbeatReceiver(
            heartbeats, members.heartbeats, metrics, members.renew
        )
        gossip = Gossip(members, peers, tls, clock=clock, metrics=metrics)
        connections = WorkerConnections(
            clock,
            count_refusals(registry, "baton_membership"),
            MembershipTls(credentials, tls),
            members.connection_ended,
        )
        app = MembershipApp(members, gossip)
        start_listening(listener)
        server = uvicorn.Server(make_server_config(app, connections, drain_timeout_s=1))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        log.info("takes announcements at %s", own)
        tasks = [asyncio.create_task(each) for each in (members.run(), gossip.run())]
        try:
            yield members
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.shutdown(sockets=[listener])
