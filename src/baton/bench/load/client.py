"""The server's address, request bodies, and one request over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, Self, assert_never
from urllib.parse import urlsplit

import aiohttp
import msgspec

from baton.bench.load.stream import Answer, EventParser, Failure, read_error
from baton.bench.workloads.requests import Endpoint, GivenBody, Request, Segments
from baton.bench.workloads.synthetic import Calibration, PromptWriter, TokenIds
from baton.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.clock import Clock

PATHS: Final[dict[Endpoint, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `base_url` ends without a slash and without `/v1`; the key is never printed."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)

    def url(self, endpoint: Endpoint) -> str:
        """The URL of this endpoint."""
        return self.base_url + PATHS[endpoint]

    @property
    def models_url(self) -> str:
        """The URL of the list of models."""
        return f"{self.base_url}/v1/models"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def open_target(url: str, api_key: str | None) -> Target:
    """Parse `--url`.

    Raises:
        ConfigError: it is no URL of a server, or it has a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"--url {url}: {exc}") from exc
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ConfigError(f"--url {url}: no address of a server, such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ConfigError("--url: no password in it, please: results keep the address")
    if parts.query or parts.fragment:
        raise ConfigError(f"--url {url}: the server's address only, without ? and #")
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    for suffix in (*PATHS.values(), "/v1"):
        base = base.removesuffix(suffix)
    return Target(base, api_key)


@dataclass(frozen=True, slots=True)
class RequestStyle:
    """What this server's requests look like.

    `endpoint` is for generated prompts. `form`: token ids, or words by a calibration.
    `has_exact_lengths`: the server accepts `ignore_eos`, so answers have the requested length.
    """

    model: str
    endpoint: Endpoint
    form: TokenIds | Calibration
    has_exact_lengths: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """An encoded request."""

    endpoint: Endpoint
    body: bytes
    ask: Request


@dataclass(frozen=True, slots=True)
class BodyWriter:
    """Encodes requests of one run. Immutable."""

    style: RequestStyle
    prompts: PromptWriter

    def prepare(self, ask: Request) -> Prepared:
        """Encode a request."""
        match ask.prompt:
            case Segments() as segments:
                endpoint = self.style.endpoint
                fields = {**self._prompt(segments), **self._lengths(ask)}
            case GivenBody(endpoint, given):
                fields = dict(given)
            case other:
                assert_never(other)
        fields |= {
            "model": self.style.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Prepared(endpoint, msgspec.json.encode(fields), ask)

    def _prompt(self, segments: Segments) -> dict[str, object]:
        match self.style.form:
            case TokenIds() as ids:
                return {"prompt": self.prompts.write_ids(segments, ids)}
            case Calibration() as calibration:
                text = self.prompts.write_words(segments, calibration)
                if self.style.endpoint == "chat":
                    return {"messages": [{"role": "user", "content": text}]}
                return {"prompt": text}
            case other:
                assert_never(other)

    def _lengths(self, ask: Request) -> dict[str, object]:
        fields: dict[str, object] = {"temperature": 0.0}
        if ask.num_output_tokens is not None:
            fields["max_tokens"] = ask.num_output_tokens
            if self.style.has_exact_lengths:
                fields["ignore_eos"] = True
        return fields


READ_BYTES: Final = 1 << 20
"""aiohttp's own 64 KiB made a client ten times slower than its server (vllm#39963)."""
CONNECT_TIMEOUT_S: Final = 10.0
KEEP_IDLE_S: Final = 2.0
"""Shorter than a server's own timeout (uvicorn: 5 s): it closes no connection that is in use."""
MAX_ERROR_BYTES: Final = 4096
OK: Final = 200


@dataclass(slots=True)
class Exchange:
    """One request's result, by the clock's time. `is_cut`: it was cancelled."""

    sent_at: float
    answer: Answer = field(default_factory=lambda: Answer([]))
    first_byte_at: float | None = None
    ended_at: float = 0.0
    status: int | None = None
    failure: Failure | None = None
    is_cut: bool = False


class Client:
    """Sends requests concurrently. Runs on the event loop that created it.

    `names` gives each an id, by which the server's traces are found later. `last_token_at`: when
    any of them received a token, by the clock.
    """

    def __init__(
        self,
        target: Target,
        clock: Clock,
        request_timeout_s: float,
        names: Iterator[str] | None = None,
    ) -> None:
        self.target = target
        self.last_token_at = -inf
        # No cookies: each request is a client of its own to a load balancer with sticky sessions.
        self.session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=READ_BYTES,
            headers=target.headers,
        )
        self._clock, self._timeout_s, self._names = clock, request_timeout_s, names

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def exchange(self, prepared: Prepared) -> Exchange:
        """Send it and read its whole answer. A failure is part of the result.

        Cancelled, it returns what was received until then, with `is_cut`.
        """
        found = Exchange(self._clock.now())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(prepared, found)
        except asyncio.CancelledError:
            found.is_cut = True
        except TimeoutError as exc:
            message = str(exc) or f"no complete answer in {self._timeout_s:g} s"
            found.failure = Failure("timeout", message)
        except aiohttp.ClientConnectorError as exc:
            found.failure = Failure("connect", str(exc.os_error))
        except (aiohttp.ClientError, OSError) as exc:
            message = str(exc) or type(exc).__name__
            found.failure = Failure("lost", f"the connection ended: {message}")
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
                body = await read_body(response, MAX_ERROR_BYTES)
                found.failure = Failure("refused", f"HTTP {response.status}: {read_error(body)}")
                return
            parser = EventParser()
            async for data in response.content.iter_any():
                now = self._clock.now()
                if found.first_byte_at is None:
                    found.first_byte_at = now
                for event in parser.feed(data):
                    found.answer.push(event, now)
                if found.answer.token_at:
                    self.last_token_at = found.answer.token_at[-1]
        found.failure = found.answer.end()


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The first `most` bytes; one read alone has what has arrived by then."""
    body = b""
    while len(body) < most and (part := await response.content.read(most - len(body))):
        body += part
    return body
