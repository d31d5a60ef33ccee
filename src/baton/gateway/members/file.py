"""Source `file:/PATH`: a members file (`baton.protocol.members`), read every `POLL_S`.

A file that is missing, half-written, too large or no members file changes nothing: the list before
it stays. It is read whole and compared, as an edit in place may leave its size and times alike.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, ProtocolError
from baton.gateway.members.interface import NoSourceOptions, SourceFactory, SourceSetup
from baton.gateway.options import WorkerAddress
from baton.net.daemon_thread import begin_call
from baton.protocol.members import MAX_MEMBERS_FILE_BYTES, decode_members
from baton.registry import Plugin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POLL_S: Final = 0.5
READ_TIMEOUT_S: Final = 5.0


class FileSource:
    """A `WorkerSource`.

    Raises:
        ConfigError: the argument is no absolute path.
    """

    def __init__(self, setup: SourceSetup) -> None:
        self._path, self._status = Path(setup.argument), setup.status
        if not self._path.is_absolute():
            raise ConfigError(
                f"gateway.members: {setup.status.name!r} is no absolute path; write it as "
                "file:/DIRECTORY/members.json"
            )
        self._last: bytes | None = None
        self._reading: asyncio.Future[bytes] | None = None

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """See `WorkerSource`."""
        while True:
            found = await self._read()
            if found is not None:
                yield found
            await asyncio.sleep(POLL_S)

    async def _read(self) -> frozenset[WorkerAddress] | None:
        """The list, if the file has another one than before."""
        try:
            content = await self._content()
            if content == self._last:
                self._status.note_read()
                return None
            addresses = read_addresses(content)
        except TimeoutError:
            self._status.note_error(f"reading it takes more than {READ_TIMEOUT_S:g} s")
        except OSError as exc:
            self._status.note_error(f"it cannot be read: {exc.strerror or exc}")
        except (ProtocolError, ConfigError) as exc:
            self._status.note_error(str(exc))
        else:
            self._last = content
            self._status.note_read()
            return addresses
        return None

    async def _content(self) -> bytes:
        """On a thread, since the file may be on another host: one at a time, even if it hangs."""
        if self._reading is None:
            reading = begin_call("members-file", partial(read_bounded, self._path))
            self._reading = asyncio.wrap_future(reading)
            # Whoever waits for it may be cancelled.
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        async with asyncio.timeout(READ_TIMEOUT_S):
            await asyncio.wait({self._reading})
        done, self._reading = self._reading, None
        return done.result()


def read_bounded(path: Path) -> bytes:
    """The content of a regular file that not every user may write; at most a byte too many.

    Raises:
        OSError: it cannot be read.
        ProtocolError: it is no such file.
    """
    # Without O_NONBLOCK a pipe of that name would be waited for.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ProtocolError("it is no regular file")
        if mode & stat.S_IWOTH:
            raise ProtocolError(f"every user may write it: run `chmod o-w {path}`")
        content = b""
        while part := os.read(fd, MAX_MEMBERS_FILE_BYTES + 1 - len(content)):
            content += part
        return content
    finally:
        os.close(fd)


def read_addresses(content: bytes) -> frozenset[WorkerAddress]:
    """The workers of a members file.

    Raises:
        ProtocolError: it is none, or lists a worker twice.
        ConfigError: a URL is no worker's address.
    """
    workers = decode_members(content).workers
    addresses = frozenset(WorkerAddress(each.url, each.role, each.draining) for each in workers)
    num_of = Counter(each.url.rstrip("/") for each in workers)
    if twice := [url for url, num in num_of.items() if num > 1]:
        raise ProtocolError(f"it lists {twice[0]} twice")
    return addresses


PLUGIN: Plugin[NoSourceOptions, SourceFactory] = Plugin(NoSourceOptions, lambda _: FileSource)
