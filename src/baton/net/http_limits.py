"""Bounds on what clients may hold of an HTTP server, and who has to go when they are reached.

A place that a new connection needs is taken from the one that has waited longest without a whole
request, first from its own address; what is refused is answered in OpenAI's form, counted and
logged.
"""

from __future__ import annotations

import logging
import resource
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import ConfigError
from baton.net.multiplex import Multiplexes
from baton.net.turn_writes import TurnWrites
from baton.protocol.worker_http import ErrorBody, ErrorDetail
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock
    from baton.net.http_protocol import BoundedHttpProtocol
    from baton.net.tls import HttpTls

DESCRIPTORS_PER_CONNECTION: Final = 3
"""A client's, and one to each of two workers."""
RESERVED_DESCRIPTORS: Final = 128

log = logging.getLogger(__name__)


class Refusal(StrEnum):
    """Why the server closed a connection that was not at its end."""

    HEAD_TOO_LARGE = "head_too_large"
    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    MALFORMED = "malformed"
    NOT_TRUSTED = "not_trusted"
    NOT_ALLOWED = "not_allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What clients may hold. Durations in seconds.

    `min_body_bytes` of a body must come in each `body_window_s`, as long as it is awaited. For
    `last_request_s` of a server that ends, each idle connection may bring one more request.
    """

    max_head_bytes: int = 64 * 1024
    head_timeout_s: float = 10.0
    body_window_s: float = 10.0
    min_body_bytes: int = 64 * 1024
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    last_request_s: float = 0.0


WORKER_LIMITS: Final = HttpLimits(max_connections_per_address=4096)
"""One gateway may be all the clients that a worker has."""


def allow_descriptors(limits: HttpLimits) -> HttpLimits:
    """Raise this process's limit on open files; `limits` with no more connections than then fit.

    A process that cannot open another file neither accepts nor reaches a worker, and the event loop
    closes new connections without a word. libzmq ends the process in which it cannot.

    Raises:
        ConfigError: not even one connection fits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections * DESCRIPTORS_PER_CONNECTION + RESERVED_DESCRIPTORS
    if 0 <= soft < wanted:  # RLIM_INFINITY is -1
        soft = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not 0 <= soft < wanted:
        return limits
    fitting = (soft - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CONNECTION
    if fitting < 1:
        least = RESERVED_DESCRIPTORS + DESCRIPTORS_PER_CONNECTION
        raise ConfigError(f"this process may open {soft} files and needs {least}: raise ulimit -n")
    log.warning(
        "at most %d connections at once, not %d: this process may open %d files; raise ulimit -n",
        *(fitting, limits.max_connections, soft),
    )
    return replace(limits, max_connections=fitting)


class Connections:
    """The connections of one server. Owner: its event loop's thread.

    With `tls`, clients prove who they are before anything of theirs is read.
    """

    def __init__(
        self,
        limits: HttpLimits,
        clock: Clock,
        on_refused: Callable[[Refusal], None],
        tls: HttpTls | None = None,
    ) -> None:
        self.limits, self.tls = limits, tls
        self.multiplexes = Multiplexes()
        self.turn_writes = TurnWrites()
        self._log, self._on_refused = LimitedLog(log, clock), on_refused
        # The longest wait first. One that was served before is likely to be an honest client's.
        self._new: dict[BoundedHttpProtocol, None] = {}
        self._idle: dict[BoundedHttpProtocol, None] = {}
        self._num_of: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """All of them."""
        return self._num_of.total()

    def admit(self, connection: BoundedHttpProtocol) -> bool:
        """Count a new connection; whether there is a place for it, perhaps another's."""
        address, limits = connection.address, self.limits
        waiting = chain(self._new, self._idle)
        is_own_full = self._num_of[address] >= limits.max_connections_per_address
        is_full = is_own_full or self.num_open >= limits.max_connections
        self._num_of[address] += 1
        if not is_full:
            return True
        own = (other for other in waiting if not is_own_full or other.address == address)
        victim = next(filter(_makes_room, own), None)
        if victim is None:
            return False
        victim.refuse(Refusal.TOO_MANY_CONNECTIONS, "its place was needed; it had no request")
        return True

    def wait(self, connection: BoundedHttpProtocol) -> None:
        """A connection awaits a request from now on."""
        (self._idle if connection.was_served else self._new)[connection] = None

    def serve(self, connection: BoundedHttpProtocol) -> None:
        """A connection has a whole head."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)

    def leave(self, connection: BoundedHttpProtocol) -> None:
        """A connection that was counted is over."""
        self.serve(connection)
        self._num_of[connection.address] -= 1
        if self._num_of[connection.address] <= 0:
            del self._num_of[connection.address]

    def report(self, refusal: Refusal, address: str, reason: str) -> None:
        """A connection was refused."""
        self._on_refused(refusal)
        self._log.warning(refusal, f"closed a connection from {address}: {reason}")


def _makes_room(waiting: BoundedHttpProtocol) -> bool:
    """Whether closing a connection that waits for a request ends it at once."""
    transport = waiting.transport
    return not (transport.is_closing() or transport.get_write_buffer_size())


_STATUSES: Final = {
    Refusal.HEAD_TOO_LARGE: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    Refusal.HEAD_TIMEOUT: HTTPStatus.REQUEST_TIMEOUT,
    Refusal.BODY_TIMEOUT: HTTPStatus.REQUEST_TIMEOUT,
    Refusal.TOO_MANY_CONNECTIONS: HTTPStatus.SERVICE_UNAVAILABLE,
    Refusal.MALFORMED: HTTPStatus.BAD_REQUEST,
    Refusal.NOT_TRUSTED: HTTPStatus.UNAUTHORIZED,
    Refusal.NOT_ALLOWED: HTTPStatus.FORBIDDEN,
}


def refusal_answer(refusal: Refusal, reason: str) -> bytes:
    """The response to a request, or to what was none, that is refused."""
    status = _STATUSES[refusal]
    is_ours = refusal is Refusal.TOO_MANY_CONNECTIONS
    kind = "overloaded_error" if is_ours else "invalid_request_error"
    body = msgspec.json.encode(ErrorBody(ErrorDetail(reason, kind, code=refusal)))
    retry = "retry-after: 1\r\n" if is_ours else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body
