"""Keeps a gateway's members file: asks the workers' supervisors for their addresses."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from baton.errors import UNDECODABLE, ProtocolError
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetMember
from baton.launch.members_file import replace_members
from baton.launch.ray.known_workers import KnownWorkers
from baton.launch.ray.plan import role_of

if TYPE_CHECKING:
    from pathlib import Path

    from baton.protocol.members import MembersFile

POLL_INTERVAL_S: Final = 0.5
MAX_CALLS_PER_S: Final = 200.0
"""Of one gateway's supervisor: in a larger fleet it asks less often."""
CALL_TIMEOUT_S: Final = 1.0

log = logging.getLogger(__name__)

_member_decoder: Final = msgspec.json.Decoder(FleetMember)


class Supervisors(Protocol):
    """Calls of a fleet's supervisors."""

    async def list_names(self, timeout_s: float) -> frozenset[str]:
        """Names of all processes that Ray has in this fleet, also of those not placed yet.

        Raises:
            FleetError: Ray's head does not answer in time.
        """
        ...

    async def call(self, name: str, method: str, *arguments: object, timeout_s: float) -> object:
        """What a method of one supervisor returns.

        Raises:
            FleetError: there is no such process, it does not answer in time, or it refuses.
        """
        ...


def read_member(answer: object) -> FleetMember:
    """Decode what a supervisor reports.

    Raises:
        FleetError: it is no report, as another version of Baton may send it.
    """
    try:
        return _member_decoder.decode(answer if isinstance(answer, bytes) else b"")
    except UNDECODABLE as exc:
        raise FleetError(
            f"a supervisor reports what this version of Baton cannot read: {exc}; install the same "
            "version on all hosts"
        ) from exc


class MembersFileWriter:
    """Owned by one event loop. `written` is what is in the file; None before the first time.

    `problem`: why it could not be written at last.

    While Ray's head is away, workers' supervisors are asked as before, and none is forgotten.
    """

    def __init__(self, supervisors: Supervisors, path: Path) -> None:
        self._supervisors, self._path = supervisors, path
        self._known = KnownWorkers()
        self._names: frozenset[str] = frozenset()
        self._is_head_away = False
        self.problem: OSError | None = None
        self.written: MembersFile | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(max(POLL_INTERVAL_S, len(self._names) / MAX_CALLS_PER_S))

    async def poll(self) -> None:
        """Ask each worker's supervisor once, at the same time, and write what is new."""
        await self._list_names()
        members = await asyncio.gather(*(self._ask(name) for name in sorted(self._names)))
        for member in members:
            if member is not None:
                self._known.apply(member)
        self.write()

    def write(self) -> None:
        """Replace the file, if it is not what it should be, and if the disk lets that be."""
        file = self._known.to_file()
        if file == self.written:
            return
        try:
            replace_members(self._path, file)
        except OSError as exc:
            if self.problem is None:
                log.error("the gateway keeps the workers it has: cannot write %s", exc)  # noqa: TRY400
            self.problem = exc
        else:
            self.written, self.problem = file, None

    async def _list_names(self) -> None:
        try:
            names = await self._supervisors.list_names(CALL_TIMEOUT_S)
        except FleetError as exc:
            if not self._is_head_away:
                log.warning("the list of workers stays as it is: %s", exc)
            self._is_head_away = True
            return
        self._is_head_away = False
        self._names = frozenset(name for name in names if _is_worker(name))
        self._known.retain(self._names)

    async def _ask(self, name: str) -> FleetMember | None:
        try:
            answer = await self._supervisors.call(name, "status", timeout_s=CALL_TIMEOUT_S)
            return read_member(answer)
        except FleetError:  # `KnownWorkers` keeps it as it was
            return None


def _is_worker(name: str) -> bool:
    try:
        return role_of(name) != "gateway"
    except ProtocolError:
        return False
