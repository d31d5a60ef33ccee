"""A running gateway's pages: `/ready`, `/metrics`, `/debug/…`."""

from __future__ import annotations

import http.client
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from baton.config.environment import read_environment
from baton.errors import UNDECODABLE, BatonError, ConfigError
from baton.protocol.management import MANAGEMENT_KEY_HEADER
from baton.protocol.worker_http import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_TIMEOUT_S: Final = 3.0
MAX_PAGE_BYTES: Final = 16 << 20
MAX_REASON_CHARS: Final = 200
MANAGEMENT_KEY_VARIABLE: Final = "BATON_MANAGEMENT_KEY"
OK: Final = 200
NOT_FOUND: Final = 404
NOT_THERE: Final = "is the gateway running, and is this its URL?"

T = TypeVar("T", bound=msgspec.Struct)


class ListedRequest(msgspec.Struct, frozen=True):
    """What is read of one line of `/debug/requests`."""

    id: str


class RequestIds(msgspec.Struct, frozen=True):
    """What is read of `/debug/requests`, of whatever version the gateway is."""

    requests: tuple[ListedRequest, ...]


class PageError(BatonError):
    """A page of the gateway could not be read."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a gateway answers. Redirects are not followed, proxies not used."""

    url: str
    host: str
    port: int
    is_tls: bool

    @classmethod
    def at(cls, url: str, flag: str) -> Gateway:
        """Read a URL, which was given as `flag`.

        Raises:
            ConfigError: it is not `http://HOST[:PORT]`.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as a resolver would be asked
        except ValueError as exc:
            raise ConfigError(f"{flag} {url!r}: {exc}") from exc
        has_more = parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username
        if parts.scheme not in {"http", "https"} or not parts.hostname or has_more:
            raise ConfigError(f"{flag} {url!r} is not a gateway's URL, as http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        return cls(url.rstrip("/"), parts.hostname, port or (443 if is_tls else 80), is_tls)

    def list_addresses(self) -> tuple[Gateway, ...]:
        """Each address of this host name as a gateway of its own. Blocks.

        Raises:
            PageError: the name does not resolve.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as exc:
            raise PageError(f"{self.url}: {self.host} does not resolve: {exc.strerror}") from exc
        hosts = sorted({str(address[0]) for *_, address in found})
        scheme = "https" if self.is_tls else "http"
        return tuple(
            Gateway(
                f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}",
                host,
                self.port,
                self.is_tls,
            )
            for host in hosts
        )

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a page.

        Raises:
            PageError: no answer, or one that makes no sense.
        """
        return self._fetch("GET", path, None, {})

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a JSON body.

        Raises:
            PageError: no answer, or one that makes no sense.
        """
        return self._fetch(
            "POST", path, body, {"content-type": "application/json", **(headers or {})}
        )

    def _fetch(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self.is_tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.request(method, path, body, {**headers, **management_headers()})
            response = connection.getresponse()
            page = response.read(MAX_PAGE_BYTES + 1)
        except ConnectionRefusedError as exc:
            raise PageError(f"{self.url}{path}: {type(exc).__name__}: {exc}; {NOT_THERE}") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise PageError(f"{self.url}{path}: {type(exc).__name__}: {exc}") from exc
        finally:
            connection.close()
        if len(page) > MAX_PAGE_BYTES:
            raise PageError(f"{self.url}{path} has more than {MAX_PAGE_BYTES} bytes")
        return response.status, page


def management_headers() -> dict[str, str]:
    """What shows a gateway the management key, where this process was given one.

    Raises:
        PageError: no header can have it.
    """
    key = read_environment().get(MANAGEMENT_KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise PageError(f"{MANAGEMENT_KEY_VARIABLE} has a character that no header can have")
    return {MANAGEMENT_KEY_HEADER: key} if key else {}


def read_refusal(body: bytes) -> str:
    """The reason in an error answer, on one line."""
    try:
        text = msgspec.json.decode(body, type=ErrorBody).error.message or ""
    except UNDECODABLE:
        text = body[:MAX_REASON_CHARS].decode(errors="replace")
    return re.sub(r"\s+", " ", text)[:MAX_REASON_CHARS]


def decode_page(gateway: Gateway, path: str, answer: tuple[int, bytes], kind: type[T]) -> T:
    """A page's status and body, decoded.

    Raises:
        PageError: the gateway does not show the page, and why; or it is of another version.
    """
    status, body = answer
    if status != OK:
        reason = read_refusal(body)
        if status == NOT_FOUND and path in reason:
            reason += (
                ". A gateway shows its /debug pages to clients on its own machine, and where it "
                "has a management port (gateway.management_port), there alone"
            )
        raise PageError(f"{gateway.url}{path} answers {status}: {reason}")
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as exc:
        raise PageError(f"{gateway.url}{path} is no page of this version: {exc}") from exc
