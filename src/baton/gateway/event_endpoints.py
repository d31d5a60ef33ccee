"""Where a worker's KV events are had: what it says, checked, and seen from the gateway's side.

It comes from the worker: no answer may make the gateway reach out to a host, or open a file or a
port, other than on the host by which the operator listed that worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.config.cluster_key import is_loopback
from baton.errors import ConfigError
from baton.events.subscription import LiveEndpoint, ReplayEndpoint
from baton.gateway.worker_info import is_same_host

if TYPE_CHECKING:
    from yarl import URL

    from baton.gateway.worker_info import KVEventsSource

IPC: Final = "ipc://"
MAX_PATH_BYTES: Final = 107
"""Of a Unix socket's address on Linux, without the NUL that ends it."""

LOOPBACK: Final = "127.0.0.1"
ANY_HOST: Final = frozenset({"*", "0.0.0.0"})  # noqa: S104 - read here, not bound
MAX_PORT: Final = 65_535
_TCP: Final = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where one worker is followed. Without `replay`, whatever is missed is lost."""

    live: LiveEndpoint
    replay: ReplayEndpoint | None


def locate_events(source: KVEventsSource, listed: URL) -> EventEndpoints:
    """What to connect to, or to bind, for a worker that the operator listed at this address.

    Raises:
        ConfigError: it cannot be followed from here, or must not be; says what to change.
    """
    replay = source.replay_endpoint
    return EventEndpoints(
        _live(source.endpoint, source.topic, listed.host or ""),
        None if replay is None else _replay(replay, listed.host or ""),
    )


def _live(text: str, topic: str, listed: str) -> LiveEndpoint:
    if text.startswith(IPC):
        return LiveEndpoint(_path(text, listed), topic)
    host, port = _read_tcp(text)
    if host == "*":
        return LiveEndpoint(_tcp(_reachable(listed), port), topic)
    if is_loopback(host) and is_loopback(listed):
        return LiveEndpoint(_tcp(_address(host), port), topic, bind=True)
    raise ConfigError(
        f"vLLM connects to its endpoint {text!r} and does not listen there; "
        f'start it with "endpoint": "tcp://*:{port}"'
    )


def _replay(text: str, listed: str) -> ReplayEndpoint:
    """This one vLLM listens at in any case."""
    if text.startswith(IPC):
        return ReplayEndpoint(_path(text, listed))
    host, port = _read_tcp(text)
    if host in ANY_HOST:
        return ReplayEndpoint(_tcp(_reachable(listed), port))
    if is_same_host(host, listed):
        return ReplayEndpoint(_tcp(_address(host), port))
    raise ConfigError(
        f"its replay endpoint {text!r} is not on the host by which it is listed, {listed}; "
        f'start it with "replay_endpoint": "tcp://*:{port}"'
    )


def _path(text: str, listed: str) -> str:
    if not is_loopback(listed):
        raise ConfigError(
            f"its endpoint {text!r} is a file of the host {listed}, which is not known to be this "
            "one; list the worker by a loopback address, or let it publish at tcp://*:PORT"
        )
    path = text.removeprefix(IPC)
    if not path.isprintable() or not 0 < len(path.encode()) <= MAX_PATH_BYTES:
        raise ConfigError(
            f"its endpoint {text!r} is no path of a socket (1 to {MAX_PATH_BYTES} bytes)"
        )
    return text


def _read_tcp(text: str) -> tuple[str, int]:
    """Host, in lower case, and port."""
    match = _TCP.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= MAX_PORT:
        raise ConfigError(
            f"its endpoint {text!r} is neither ipc://PATH nor tcp://*:PORT, with a port that is "
            "known beforehand"
        )
    return match[1].lower(), int(match[2])


def _reachable(listed: str) -> str:
    """Where a worker that listens everywhere is reached: by IPv4, as vLLM's sockets are."""
    if is_loopback(listed):
        return LOOPBACK
    if ":" in listed:
        raise ConfigError(
            f"vLLM publishes over IPv4 alone; list the worker by an IPv4 address or a name, "
            f"not as [{listed}]"
        )
    return listed


def _address(host: str) -> str:
    return LOOPBACK if host == "localhost" else host


def _tcp(host: str, port: int) -> str:
    return f"tcp://{host}:{port}"
