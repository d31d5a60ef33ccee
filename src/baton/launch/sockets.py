"""The gateway's listening sockets: the launcher holds them, each gateway inherits them.

While one gateway process replaces another, connections wait in the queue of the same socket: none
is refused, and none is lost with the process that did not accept it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.launch.ports import require_free_port
from baton.net.http_server import bind, bind_shared

if TYPE_CHECKING:
    import socket

    from baton.config.sections import GatewaySection


@dataclass(frozen=True, slots=True)
class GatewaySockets:
    """Bound sockets, one for each gateway process: for clients and, if wanted, for management."""

    host: str
    clients: tuple[socket.socket, ...]
    management_host: str
    management: tuple[socket.socket, ...]

    @property
    def port(self) -> int:
        """Where clients connect."""
        return int(self.clients[0].getsockname()[1])

    @property
    def fds(self) -> tuple[int, ...]:
        """What the gateway inherits."""
        return tuple(each.fileno() for each in (*self.clients, *self.management))

    def arguments(self) -> tuple[str, ...]:
        """The gateway's flags that name what it inherits."""
        words = ["--listen-fds", _numbers(self.clients)]
        if self.management:
            words += ["--management-fds", _numbers(self.management)]
        return tuple(words)

    def metrics_urls(self, url: str) -> tuple[str, ...]:
        """Where each gateway process answers /metrics; `url` is where clients connect."""
        urls = [_url(self.management_host, each) for each in self.management]
        return tuple(urls) or (url,)

    def close(self) -> None:
        """From now on only gateways that run accept connections."""
        for each in (*self.clients, *self.management):
            each.close()


def open_gateway_sockets(section: GatewaySection) -> GatewaySockets:
    """Bind all of them; they do not listen yet.

    Raises:
        ConfigError: a port is taken, or may not be listened on.
    """
    require_free_port(section.host, section.port)
    with ExitStack() as opened:
        if section.processes > 1:
            clients = bind_shared(section.host, section.port, section.processes)
        else:
            clients = (bind(section.host, section.port),)
        for each in clients:
            opened.callback(each.close)
        management = []
        if (port := section.management_port) is not None:
            for index in range(section.processes):
                management.append(bind(section.management_host, port and port + index))
                opened.callback(management[-1].close)
        opened.pop_all()
    return GatewaySockets(section.host, clients, section.management_host, tuple(management))


def _numbers(sockets: tuple[socket.socket, ...]) -> str:
    return ",".join(str(each.fileno()) for each in sockets)


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
