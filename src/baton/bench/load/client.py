"""One request over HTTP, and its record. Runs on the event loop that made it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import aiohttp

from baton.bench.load.sse import EventParser
from baton.bench.load.stream import Answer, Failure, read_error
from baton.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from baton.bench.load.bodies import Prepared
    from baton.bench.load.target import Target
    from baton.clock import Clock

READ_BYTES: Final = 1 << 20
"""aiohttp's own 64 KiB made a client ten times slower than its server (vllm#39963)."""
CONNECT_TIMEOUT_S: Final = 10.0
KEEP_IDLE_S: Final = 2.0
"""Shorter than servers keep idle connections (uvicorn: 5 s), so that none ends as one is used."""
MAX_ERROR_BYTES: Final = 4096
OK: Final = 200


@dataclass(slots=True)
class Exchange:
    """What one request left, in the clock's own time. `is_cut`: it was cancelled."""

    sent_at: float
    answer: Answer = field(default_factory=lambda: Answer([]))
    first_byte_at: float | None = None
    ended_at: float = 0.0
    status: int | None = None
    failure: Failure | None = None
    is_cut: bool = False


class Client:
    """Sends requests, as many at once as it is asked to.

    `names` gives each a name, by which the server's traces are found later.
    """

    def __init__(
        self,
        target: Target,
        clock: Clock,
        request_timeout_s: float,
        names: Iterator[str] | None = None,
    ) -> None:
        self.target = target
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=READ_BYTES,
            headers=target.headers,
        )
        self._clock, self._timeout_s, self._names = clock, request_timeout_s, names

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        await self.session.close()

    async def exchange(self, prepared: Prepared) -> Exchange:
        """Send it and read its answer to the end. A failure is in what returns.

        Cancelled, it returns too, cut: what came until then is kept.
        """
        found = Exchange(self._clock.now())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(prepared, found)
        except asyncio.CancelledError:
            found.is_cut = True
        except TimeoutError as exc:
            said = str(exc) or f"no complete answer in {self._timeout_s:g} s"
            found.failure = Failure("timeout", said)
        except aiohttp.ClientConnectorError as exc:
            found.failure = Failure("connect", str(exc.os_error))
        except (aiohttp.ClientError, OSError) as exc:
            said = str(exc) or type(exc).__name__
            found.failure = Failure("lost", f"the connection ended: {said}")
        except ProtocolError as exc:
            found.failure = Failure("protocol", str(exc))
        is_complete = found.failure is None and not found.is_cut
        last_at = found.answer.ended_at
        found.ended_at = last_at if is_complete and last_at is not None else self._clock.now()
        return found

    async def _read(self, prepared: Prepared, found: Exchange) -> None:
        url = self.target.url(prepared.endpoint)
        headers = {"Content-Type": "application/json"}
        if self._names is not None:
            headers["X-Request-Id"] = next(self._names)
        async with self.session.post(url, data=prepared.body, headers=headers) as response:
            found.status = response.status
            if response.status != OK:
                body = await response.content.read(MAX_ERROR_BYTES)
                found.failure = Failure("refused", f"HTTP {response.status}: {read_error(body)}")
                return
            parser = EventParser()
            async for data in response.content.iter_any():
                now = self._clock.now()
                if found.first_byte_at is None:
                    found.first_byte_at = now
                for event in parser.feed(data):
                    found.answer.push(event, now)
        found.failure = found.answer.end()
