"""Addresses of host names, each looked up on a thread of its own: one that hangs delays no other.

Event loops look names up on a few threads that all names share (uvloop: two at once), and a lookup
cannot be cancelled: names whose resolver hangs would take all of these threads.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from baton.net.daemon_thread import begin_call

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

LATE_S: Final = 0.5
"""From when on addresses that were found before are used."""
MAX_HOSTS: Final = 4096


class HostName:
    """One name: at most one lookup at a time. Its owners are event loops' threads."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._found: tuple[str, ...] = ()
        self._running: Future[tuple[str, ...] | OSError] | None = None
        self._late: Future[tuple[str, ...] | OSError] | None = None

    async def find(
        self, timeout_s: float, *, may_be_old: bool
    ) -> tuple[tuple[str, ...], list[OSError]]:
        """The IP addresses, in the resolver's order.

        With `may_be_old`, those found last where a lookup is late or fails, and the reason.

        Raises:
            OSError: none are known.
        """
        if not (may_be_old and self._found):
            return await self.look_up(timeout_s), []
        is_late = self._late is not None and not self._late.done()
        try:
            found = await self.look_up(0.0 if is_late else min(LATE_S, timeout_s))
        except OSError as exc:
            return self._found, [exc]
        return found, []

    async def look_up(self, timeout_s: float | None = None) -> tuple[str, ...]:
        """The IP addresses now.

        Raises:
            OSError: there are none, or the resolver did not answer in time.
        """
        running = self._running
        if running is None or running.done():
            running = self._running = begin_call(f"look-up-{self._host}", self._ask)
        try:
            async with asyncio.timeout(timeout_s):
                # Its end by the timeout does not end `running`.
                answer = await asyncio.wrap_future(running)
        except TimeoutError as exc:
            self._late = running
            raise OSError(f"no answer of the resolver for {self._host}") from exc
        if isinstance(answer, OSError):
            raise type(answer)(*answer.args) from answer  # each caller adds its own traceback
        return answer

    def _ask(self) -> tuple[str, ...] | OSError:
        try:
            found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except OSError as exc:
            return exc
        except ValueError as exc:  # no host name
            return OSError(f"{self._host[:300]!r} cannot be looked up: {exc}")
        self._found = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
        return self._found


def name_of(host: str) -> HostName | None:
    """What all users of a name share; None where `host` is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _name_of(host)
    return None


def merge_errors(errors: Sequence[OSError]) -> OSError:
    """What no address took: `ConnectionRefusedError` where nothing listens at any."""
    if len(errors) == 1 or all(isinstance(each, ConnectionRefusedError) for each in errors):
        return errors[-1]
    return OSError("; ".join(map(str, errors)))


@lru_cache(maxsize=MAX_HOSTS)
def _name_of(host: str) -> HostName:
    return HostName(host)
