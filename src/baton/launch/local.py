"""A fleet on this machine, as its operator controls it: over its launcher's control socket."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, assert_never

from baton.config.environment import read_environment
from baton.errors import ProtocolError
from baton.launch.control import peer_user, short_path
from baton.launch.control_messages import (
    ALIVE_S,
    MAX_ANSWER_BYTES,
    Alive,
    Answer,
    Done,
    DownRequest,
    DrainRequest,
    Progress,
    Refused,
    Request,
    ScaleRequest,
    StatusAnswer,
    StatusRequest,
    UpgradeRequest,
    decode_answer,
    encode,
)
from baton.launch.errors import FleetError
from baton.launch.fleet import DEFAULT_FLEET, FleetSize, FleetStatus
from baton.launch.folder import FleetFolder, find_launcher, fleet_folder, running_fleets
from baton.launch.logs import log_names, log_path, read_lines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 6 * ALIVE_S
RELEASE_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.05


class LocalFleet:
    """See `FleetControl`."""

    def __init__(self, folder: FleetFolder) -> None:
        self._folder = folder
        self._changing = asyncio.Lock()
        """The launcher does one thing at a time, and refuses a second one."""

    async def status(self) -> FleetStatus:
        """See `FleetControl`."""
        async with aclosing(self._ask(StatusRequest())) as answers:
            async for answer in answers:
                if isinstance(answer, StatusAnswer):
                    return answer.status
        raise FleetError("the launcher answered without the fleet's state")

    def scale(self, size: FleetSize) -> AsyncIterator[str]:
        """See `FleetControl`."""
        return self._change(ScaleRequest(size))

    def drain(self, worker: str) -> AsyncIterator[str]:
        """See `FleetControl`."""
        return self._change(DrainRequest(worker))

    def upgrade(self) -> AsyncIterator[str]:
        """See `FleetControl`."""
        return self._change(UpgradeRequest())

    async def down(self) -> AsyncIterator[str]:
        """See `FleetControl`."""
        try:
            async for line in self._change(DownRequest()):
                yield line
        except FleetError:  # where processes had to be killed, the launcher ends nevertheless
            with suppress(FleetError):
                await self._until_released()
            raise
        await self._until_released()
        yield "the fleet has ended"

    async def logs(self, member: str, num_lines: int, *, follow: bool) -> AsyncIterator[str]:
        """See `FleetControl`; those of a launch that has ended are read, too."""
        known = log_names(self._folder.logs)
        if member not in known:
            listed = f"there are those of {', '.join(known)}" if known else "there are none"
            raise FleetError(
                f"fleet {self._folder.fleet} has no log of {member!r}; {listed} "
                f"(in {self._folder.logs})"
            )
        try:
            async for line in read_lines(
                log_path(self._folder.logs, member), num_lines, follow=follow
            ):
                yield line
        except OSError as exc:
            raise FleetError(f"cannot read the log of {member}: {exc}") from exc

    async def _until_released(self) -> None:
        """Until another launcher may start.

        Raises:
            FleetError: this one does not end in time.
        """
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                while find_launcher(self._folder) is not None:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(POLL_S)
        except TimeoutError as exc:
            raise FleetError(
                f"all processes ended, but the launcher (pid {find_launcher(self._folder)}) has not"
            ) from exc

    async def _change(self, request: Request) -> AsyncIterator[str]:
        async with self._changing, aclosing(self._ask(request)) as answers:
            async for answer in answers:
                if isinstance(answer, Progress):
                    yield answer.text

    async def _ask(self, request: Request) -> AsyncGenerator[Answer]:
        """The answers to a request, without the last one.

        Raises:
            FleetError: the fleet does not run, does not answer, or refuses.
        """
        reader, writer = await self._connect()
        try:
            writer.write(encode(request))
            while True:
                answer = await self._receive(reader)
                match answer:
                    case Progress() | StatusAnswer():
                        yield answer
                    case Alive():
                        continue
                    case Done():
                        return
                    case Refused(message):
                        raise FleetError(message)
                    case _:
                        assert_never(answer)
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        folder = self._folder
        try:
            with short_path(folder.socket) as path:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_unix_connection(
                        path, limit=MAX_ANSWER_BYTES
                    )
        except (OSError, TimeoutError) as exc:
            if (pid := find_launcher(folder)) is not None:
                raise FleetError(
                    f"the launcher of fleet {folder.fleet} (pid {pid}) does not answer: {exc}; it "
                    "may be starting or ending: try again"
                ) from exc
            raise FleetError(_describe_absence(folder)) from exc
        if peer_user(writer.get_extra_info("socket")) != os.geteuid():
            writer.close()
            raise FleetError(f"{folder.socket} is another user's: remove it")
        return reader, writer

    async def _receive(self, reader: asyncio.StreamReader) -> Answer:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                line = await reader.readuntil(b"\n")
            return decode_answer(line)
        except TimeoutError as exc:
            raise FleetError(
                f"the launcher of fleet {self._folder.fleet} has been silent for "
                f"{ANSWER_TIMEOUT_S:g} s; `baton logs launcher` shows what it did last"
            ) from exc
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as exc:
            raise FleetError(
                f"the launcher of fleet {self._folder.fleet} closed the connection; `baton logs "
                "launcher` shows what it did last"
            ) from exc
        except ProtocolError as exc:
            raise FleetError(str(exc)) from exc


class LocalBackend:
    """See `FleetBackend`."""

    @asynccontextmanager
    async def connect(self, fleet: str) -> AsyncGenerator[LocalFleet]:
        """See `FleetBackend`; a fleet that does not run is found out at the first request."""
        yield LocalFleet(fleet_folder(fleet, read_environment()))


BACKEND: Final = LocalBackend()


def _describe_absence(folder: FleetFolder) -> str:
    running = running_fleets(read_environment())
    others = f"; these run: {', '.join(running)} (--fleet NAME)" if running else ""
    named = "" if folder.fleet == DEFAULT_FLEET else f" --fleet {folder.fleet}"
    return (
        f"no fleet named {folder.fleet} runs on this machine{others}. Start one with "
        f"`baton up --detach{named}`"
    )
