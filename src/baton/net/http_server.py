"""An HTTP server of Baton's: its socket, and uvicorn's settings with our protocol."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter

from baton.errors import ConfigError
from baton.net.http_limits import Connections, Refusal
from baton.net.http_protocol import KEEP_ALIVE_S, BoundedHttpProtocol
from baton.net.parent_process import ends_with_parent, remember_parent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from starlette.types import ASGIApp

BACKLOG: Final = 2048

log = logging.getLogger(__name__)


def make_server_config(
    app: ASGIApp, connections: Connections, *, drain_timeout_s: int
) -> uvicorn.Config:
    """Uvicorn's settings for one of Baton's servers; it runs in whatever loop there is."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(connections),
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_timeout_s,
    )


class SilentServer(uvicorn.Server):
    """uvicorn without handlers for signals: they are its process's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """See `uvicorn.Server`."""
        yield


@contextlib.contextmanager
def end_signals(on_signal: Callable[[int], None]) -> Generator[None]:
    """SIGTERM and SIGINT call `on_signal` on this event loop, for as long as the block runs."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    remember_parent()
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if ends_with_parent():  # whose own SIGTERM may come while the process ends in order
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def ignore_relayed(number: int) -> bool:
    """Whether a signal after the first asks for nothing new. Belongs on the main thread.

    Who stops a whole service (systemd, a scheduler) sends SIGTERM to each process, and parents then
    send it to their children once more. A parent that waits no longer kills them.
    """
    is_relayed = number == signal.SIGTERM and ends_with_parent()
    if is_relayed:
        log.info("SIGTERM again: draining goes on")
    return is_relayed


def count_refusals(registry: CollectorRegistry, prefix: str) -> Callable[[Refusal], None]:
    """For `Connections`: counts by reason."""
    counter = PrometheusCounter(
        f"{prefix}_refused_connections",
        "Connections that were closed for what they held, or for want of a place.",
        ("reason",),
        registry=registry,
    )
    children = {refusal: counter.labels(refusal) for refusal in Refusal}
    return lambda refusal: children[refusal].inc()


def bounded_protocol(connections: Connections) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`."""
    return cast("type[asyncio.Protocol]", partial(BoundedHttpProtocol, table=connections))


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A bound TCP socket that does not block; `port` 0 takes a free one.

    With `is_shared`, other shared sockets of this user may be bound to the same port; the kernel
    spreads new connections over those that listen.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol's number, by which asyncio knows where to set TCP_NODELAY.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.settimeout(0)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise _explain(exc, host, port) from exc
    return listener


def bind_shared(host: str, port: int, num_sockets: int) -> tuple[socket.socket, ...]:
    """So many shared sockets on one port, which is free of every other listener.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    with closing(bind(host, port)) as free:
        port = free.getsockname()[1]
    with ExitStack() as opened:
        sockets = []
        for _ in range(num_sockets):
            sockets.append(bind(host, port, is_shared=True))
            opened.callback(sockets[-1].close)
        opened.pop_all()
    return tuple(sockets)


def inherit(fd: int) -> socket.socket:
    """A bound TCP socket that a launcher opened, and shares with the process before this one.

    Raises:
        ConfigError: there is no such socket.
    """
    try:
        listener = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError(f"file descriptor {fd} is not a socket: {exc.strerror}") from exc
    listener.set_inheritable(False)
    listener.settimeout(0)
    return listener


def is_listening(listener: socket.socket) -> bool:
    """Whether connections may wait in its queue already: another process listened on it."""
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def start_listening(listener: socket.socket) -> None:
    """Accept connections from now on.

    Raises:
        ConfigError: another process took the port in the meantime.
    """
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as exc:
        raise _explain(exc, host, port) from exc


def _explain(exc: OSError, host: str, port: int) -> ConfigError:
    """What to do about a port that cannot be had."""
    where = f"{host}:{port}"
    if exc.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{where} is taken by another process; stop that one, choose another --port, or let "
            "the system choose with --port 0"
        )
    return ConfigError(f"cannot listen on {where}: {exc.strerror or exc}")


def url_of(listener: socket.socket, host: str, *, is_tls: bool = False) -> str:
    """The URL under which a bound socket is reached; `host` as the operator wrote it."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def serve_beside(
    app: ASGIApp, connections: Connections, listener: socket.socket, host: str
) -> AsyncGenerator[str]:
    """A second server of this process, for as long as the block runs; yields its URL, plain HTTP.

    `listener` is bound, and closed at the end.
    """
    with contextlib.closing(listener):
        start_listening(listener)
        server = uvicorn.Server(make_server_config(app, connections, drain_timeout_s=1))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        try:
            yield url_of(listener, host)
        finally:
            await server.shutdown(sockets=[listener])
