"""Where a publisher's KV events are: the live endpoint, the one for replays, and who binds.

vLLM binds its endpoint if it is `ipc://` or has a `*` or `::` in it. With `tcp://HOST:PORT` it
*connects*, and the subscriber must bind, best before vLLM starts: what is published while no
subscriber is bound is lost, except for what the replay endpoint (which vLLM always binds) has.
Apart from the sockets, so that a gateway without such workers never imports zmq.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from baton.errors import ConfigError

_SCHEMES: Final = ("ipc://", "tcp://")


@dataclass(frozen=True, slots=True)
class LiveEndpoint:
    """`ipc://PATH` or `tcp://HOST:PORT`, to connect to unless `bind`. `topic` "" takes all.

    Events are not authenticated: only a loopback address may be bound.

    Raises:
        ConfigError: an endpoint that cannot work.
    """

    endpoint: str
    topic: str = ""
    bind: bool = False

    def __post_init__(self) -> None:
        _check(self.endpoint)
        if self.bind and not _is_loopback(self.endpoint):
            raise ConfigError(
                f"KV events from {self.endpoint}: they are not authenticated, so that only "
                "tcp://127.0.0.1:PORT may be bound; let vLLM bind (tcp://*:PORT), and connect"
            )


@dataclass(frozen=True, slots=True)
class ReplayEndpoint:
    """Where missed messages can be requested: `ipc://PATH` or `tcp://HOST:PORT`.

    Raises:
        ConfigError: an endpoint that cannot work.
    """

    endpoint: str

    def __post_init__(self) -> None:
        _check(self.endpoint)


def _check(endpoint: str) -> None:
    if not endpoint.startswith(_SCHEMES):
        raise ConfigError(f"KV events from {endpoint!r}: use ipc://PATH or tcp://HOST:PORT")
    if "*" in endpoint:
        raise ConfigError(f"KV events from {endpoint}: name the publisher's host instead of *")


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
