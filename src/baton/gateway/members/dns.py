"""Source `dns:ROLE=HOST:PORT`: the addresses of a name, such as a headless service's.

The name is looked up every `gateway.members_interval_s`. An answer without addresses, or none,
changes nothing. An address leaves the list once `MISSES` answers in a row lack it: resolvers may
answer with a part of many addresses, and lag behind one another.

DNS proves nothing, so this source needs TLS: an address that is no worker of the cluster fails the
handshake, before the gateway sends anything.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.errors import ConfigError
from baton.gateway.members.interface import NoSourceOptions, SourceFactory, SourceSetup
from baton.gateway.options import WorkerAddress
from baton.net.host_names import name_of
from baton.protocol.members import MAX_MEMBERS
from baton.protocol.worker_http import Role
from baton.registry import Plugin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

MISSES: Final = 3
LOOK_UP_TIMEOUT_S: Final = 10.0
MAX_PORT: Final = 65_535
_ARGUMENT: Final = re.compile(
    r"(prefill|decode|both)=((?=.{1,253}:)(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?)"
    r":([0-9]{1,5})"
)

LookUp: TypeAlias = "Callable[[str], Awaitable[frozenset[str]]]"
"""Finds the IP addresses of a host name; raises OSError."""


async def look_up(host: str) -> frozenset[str]:
    """The A and AAAA records of a name, by the system's resolver: one lookup at a time.

    Raises:
        OSError: there are none, or the resolver did not answer.
    """
    name = name_of(host)
    found = (host,) if name is None else await name.look_up()
    # A link-local address has a scope, which no URL can have.
    return frozenset(address for address in found if "%" not in address)


class RecentAnswers:
    """The addresses that one of the last `MISSES` answers had. Pure."""

    def __init__(self) -> None:
        self._num_missed: dict[str, int] = {}

    def add(self, answer: frozenset[str]) -> frozenset[str]:
        """Take an answer up, which has at least one address; the addresses that count now."""
        missed = {address: num + 1 for address, num in self._num_missed.items()}
        missed |= dict.fromkeys(answer, 0)
        self._num_missed = {address: num for address, num in missed.items() if num < MISSES}
        return frozenset(self._num_missed)


class DnsSource:
    """A `WorkerSource`.

    Raises:
        ConfigError: the argument is not ROLE=HOST:PORT, or workers prove nothing.
    """

    def __init__(self, setup: SourceSetup, look_up: LookUp = look_up) -> None:
        match = _ARGUMENT.fullmatch(setup.argument)
        if match is None or not 0 < int(match[3]) <= MAX_PORT:
            raise ConfigError(
                f"gateway.members: {setup.status.name!r} is not dns:ROLE=HOST:PORT, with the role "
                "prefill, decode or both"
            )
        if setup.tls == "off":
            raise ConfigError(
                f'gateway.members: {setup.status.name!r} needs TLS, and security.tls is "off": the '
                "gateway would send the cluster's bearer token to any address that DNS names. "
                'Set security.tls = "control" for workers and gateway, or list workers in a file '
                "(file:/PATH)"
            )
        self._role, self._host, self._port = Role(match[1]), match[2], int(match[3])
        self._status, self._interval_s, self._look_up = setup.status, setup.interval_s, look_up
        self._answers = RecentAnswers()

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """See `WorkerSource`."""
        before: frozenset[str] | None = None
        while True:
            answer = await self._find()
            if answer is not None:
                found = self._answers.add(answer)
                if found != before:
                    before = found
                    yield frozenset(WorkerAddress(self._url(each), self._role) for each in found)
            await asyncio.sleep(self._interval_s)

    async def _find(self) -> frozenset[str] | None:
        """The addresses of the name now; None where it is not known."""
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                answer = await self._look_up(self._host)
        except TimeoutError:
            self._status.note_error(f"no answer for {self._host} in {LOOK_UP_TIMEOUT_S:g} s")
        except OSError as exc:
            self._status.note_error(f"{self._host} cannot be looked up: {exc.strerror or exc}")
        else:
            if 0 < len(answer) <= MAX_MEMBERS:
                self._status.note_read()
                return answer
            self._status.note_error(
                f"{self._host} has {len(answer)} addresses; from 1 to {MAX_MEMBERS} can be used"
            )
        return None

    def _url(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"https://{host}:{self._port}"


PLUGIN: Plugin[NoSourceOptions, SourceFactory] = Plugin(NoSourceOptions, lambda _: DnsSource)
