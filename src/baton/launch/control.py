"""The launcher's end of the control socket: who may ask, and which operation answers.

A UNIX socket in the fleet's folder. Both are this user's alone, and the kernel names the user of
each connection. An operation goes on when who asked for it is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, assert_never

from baton.errors import BatonError, ProtocolError
from baton.launch.control_messages import (
    ALIVE_S,
    MAX_REQUEST_BYTES,
    Alive,
    Answer,
    Change,
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
    decode_request,
    encode,
)
from baton.launch.errors import FleetError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
    from pathlib import Path

    from baton.launch.folder import FleetFolder
    from baton.launch.operations import FleetOperations
    from baton.launch.supervisor import Supervisor

REQUEST_TIMEOUT_S: Final = 5.0
SEND_TIMEOUT_S: Final = 5.0
BACKLOG: Final = 16
MAX_CONNECTIONS: Final = 32
_CREDENTIALS: Final = struct.Struct("3i")


class Control:
    """Answers requests about one launch. Owned by the launcher's event loop."""

    def __init__(
        self, supervisor: Supervisor, operations: FleetOperations, show: Callable[[str], None]
    ) -> None:
        self._supervisor, self._operations, self._show = supervisor, operations, show
        self._connections: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def serving(self, folder: FleetFolder) -> AsyncGenerator[None]:
        """Take requests, for as long as the block runs; then answer those that wait for its end."""
        listener = _listen(folder)
        server = await asyncio.start_unix_server(
            self._serve, sock=listener, limit=MAX_REQUEST_BYTES
        )
        try:
            yield
        finally:
            server.close()
            if self._connections:
                await asyncio.wait(self._connections, timeout=SEND_TIMEOUT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (for mypy)
        if peer_user(writer.get_extra_info("socket")) != os.geteuid() or (
            len(self._connections) >= MAX_CONNECTIONS
        ):
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._answer(await _receive(reader), writer)
        except BatonError as exc:
            await _send(writer, Refused(str(exc)))
        except TimeoutError:
            await _send(writer, Refused(f"no request within {REQUEST_TIMEOUT_S:g} s"))
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        match request:
            case StatusRequest():
                await _send(writer, StatusAnswer(self._operations.status()))
                await _send(writer, Done())
            case DownRequest():
                await self._stop(writer)
            case ScaleRequest() | DrainRequest() | UpgradeRequest():
                await self._change(request, writer)
            case _:
                assert_never(request)

    async def _stop(self, writer: asyncio.StreamWriter) -> None:
        pending = ", ".join(self._supervisor.processes)
        await _send(writer, Progress(f"draining {pending}"))
        for slot in list(self._supervisor.slots.values()):
            if slot.has_failed:
                await _send(writer, Progress(f"{slot.name} did not serve: {slot.reason}"))
        if not self._supervisor.is_stopping:  # a second request would kill
            self._supervisor.request_stop()
        while not (ended := self._supervisor.stopped).done():
            await asyncio.wait([ended], timeout=ALIVE_S)
            await _send(writer, Alive())
        stopped = ended.result()
        await _send(writer, Progress(f"stopped: {stopped.processes}"))
        await _send(writer, Done() if stopped.problem is None else Refused(stopped.problem))

    async def _change(self, request: Change, writer: asyncio.StreamWriter) -> None:
        steps: asyncio.Queue[str | None] = asyncio.Queue()

        def report(text: str) -> None:
            self._show(text)
            steps.put_nowait(text)

        name, work = self._prepare(request, report)
        task = self._supervisor.begin(name, work)
        task.add_done_callback(lambda _: steps.put_nowait(None))
        while True:
            try:
                async with asyncio.timeout(ALIVE_S):
                    text = await steps.get()
            except TimeoutError:
                await _send(writer, Alive())
                continue
            if text is None:
                break
            await _send(writer, Progress(text))
        await _send(writer, self._outcome(task))

    def _prepare(
        self, request: Change, report: Callable[[str], None]
    ) -> tuple[str, Coroutine[Any, Any, None]]:
        match request:
            case ScaleRequest(size):
                return "baton scale", self._operations.scale(size, report)
            case DrainRequest(worker):
                return "baton drain", self._operations.drain(worker, report)
            case UpgradeRequest():
                return "baton upgrade", self._operations.upgrade(report)
            case _:
                assert_never(request)

    def _outcome(self, task: asyncio.Task[None]) -> Answer:
        if task.cancelled():
            return Refused("the fleet was stopped meanwhile")
        if (exc := task.exception()) is None:
            return Done()
        if isinstance(exc, BatonError):
            self._show(f"{task.get_name()}: {exc}")
            return Refused(str(exc))
        raise exc


def peer_user(connection: socket.socket) -> int:
    """The user at the other end of a UNIX socket, as the kernel knows it."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(given)
    return int(user)


@contextmanager
def short_path(path: Path) -> Generator[str]:
    """Another path of a socket, as long as the block runs: a socket's has at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _listen(folder: FleetFolder) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(folder.socket) as path:
            listener.bind(path)
        folder.socket.chmod(0o600)  # before it listens; the folder is this user's alone besides
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003
    except OSError as exc:
        listener.close()
        raise FleetError(f"cannot listen on {folder.socket}: {exc.strerror}") from exc
    return listener


async def _receive(reader: asyncio.StreamReader) -> Request:
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        try:
            return decode_request(await reader.readuntil(b"\n"))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as exc:
            raise ProtocolError(f"no whole request of at most {MAX_REQUEST_BYTES} bytes") from exc


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    """Send, to whoever still reads: what is done does not depend on it."""
    if writer.is_closing():
        return
    writer.write(encode(answer))
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await writer.drain()
    except (TimeoutError, OSError):
        writer.close()
