"""One request to a Kubernetes API server: its deadline, its bounds, its errors.

Each request has a connection of its own, with the credentials as they are then.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import aiohttp

from baton.net.kubernetes.access import ApiAccess, KubernetesApiError
from baton.net.kubernetes.objects import ObjectPage, decode_status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

ANSWER_TIMEOUT_S: Final = 10.0
"""For a request that is answered at once, or one page of a list; to connect, for all."""
PAGE_ITEMS: Final = 100
MAX_PAGES: Final = 100
MAX_LIST_BYTES: Final = 32 << 20
"""All pages together."""
MAX_LINE_BYTES: Final = 4 << 20
"""Objects in etcd have 1.5 MiB at most, which are more in JSON."""
MAX_ANSWER_BYTES: Final = 64 << 10

T = TypeVar("T")


class ApiConnectionError(KubernetesApiError):
    """There was no connection, or it ended in the middle of an answer, or it took too long."""


class ApiRefusedError(KubernetesApiError):
    """The server answered with an error. `status`: of HTTP; `answer`: its own words.

    `retry_after_s` None: it does not state when to try again.
    """

    def __init__(self, problem: str, status: int, answer: str, retry_after_s: float | None) -> None:
        super().__init__(f"{problem}; its answer: {answer or 'none'}")
        self.status, self.answer, self.retry_after_s = status, answer, retry_after_s


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """`name` is for messages, such as "list pods"; `path` begins with a slash."""

    name: str
    path: str
    method: str = "GET"
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """All objects of a list, as they were at one version."""

    version: str
    objects: tuple[T, ...]


class ApiConnection:
    """Asks one API server. Owner: the event loop's thread."""

    def __init__(self, access: ApiAccess, session: aiohttp.ClientSession) -> None:
        self.access, self._session = access, session

    @contextlib.asynccontextmanager
    async def ask(
        self, request: ApiRequest, timeout_s: float | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The answer, whose body is to be read inside the block. `timeout_s`: for all of it.

        Raises:
            ApiRefusedError: the server answered with an error.
            ApiConnectionError: no answer, or none that can be trusted, or not all of it.
            KubernetesApiError: there are no credentials.
        """
        credentials = await self.access.find_credentials()
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        if credentials.token is not None:
            headers["authorization"] = f"Bearer {credentials.token}"
        if request.body is not None:
            headers["content-type"] = request.content_type
        url = self.access.url
        try:
            async with self._session.request(
                request.method,
                f"{url}{request.path}",
                params=request.query,
                data=request.body,
                headers=headers,
                ssl=credentials.tls or True,
                server_hostname=credentials.server_name,
                allow_redirects=False,  # the token is for this server alone
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=ANSWER_TIMEOUT_S),
            ) as response:
                if response.status not in {HTTPStatus.OK, HTTPStatus.CREATED}:
                    raise await self._refused(request, response)
                yield response
        except aiohttp.ClientSSLError as exc:
            raise ApiConnectionError(f"TLS with {url} failed: {_describe(exc)}") from exc
        except TimeoutError as exc:
            raise ApiConnectionError(f"{url} has not answered {request.name} in time") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ApiConnectionError(f"{url}: {_describe(exc)}") from exc

    async def fetch(self, request: ApiRequest, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """The body of an answer that comes at once.

        Raises:
            KubernetesApiError: as of `ask`, or it is too long.
        """
        async with self.ask(request, ANSWER_TIMEOUT_S) as response:
            return await _read_bounded(response, max_bytes)

    async def list_objects(
        self, name: str, path: str, selector: str, decode: Callable[[bytes], ObjectPage[T]]
    ) -> Listed[T]:
        """All objects that a label selector takes; at most `ANSWER_TIMEOUT_S` for each page.

        Raises:
            KubernetesApiError: as of `fetch`, or there are too many.
            ProtocolError: a page does not decode.
        """
        query = {"labelSelector": selector, "limit": str(PAGE_ITEMS)}
        objects: list[T] = []
        room_bytes = MAX_LIST_BYTES
        for _ in range(MAX_PAGES):
            body = await self.fetch(ApiRequest(f"list {name}", path, query=query), room_bytes)
            room_bytes -= len(body)
            page = decode(body)
            objects += page.items or ()
            if not page.metadata.continue_token:
                return Listed(page.metadata.resource_version, tuple(objects))
            query["continue"] = page.metadata.continue_token
        raise KubernetesApiError(f"the list of {name} has more than {MAX_PAGES} pages")

    async def _refused(
        self, request: ApiRequest, response: aiohttp.ClientResponse
    ) -> ApiRefusedError:
        body = await _read_bounded(response, MAX_ANSWER_BYTES)
        answer = decode_status(body)
        stated = answer.details.retry_after_seconds if answer.details else 0
        header = response.headers.get("retry-after", "")
        retry_after_s = float(header) if header.isdecimal() else float(stated)
        problem = f"HTTP {response.status} to {request.name}"
        if response.status == HTTPStatus.UNAUTHORIZED:
            name = self.access.credentials_name
            problem = f"{name} was refused: expired, or of another cluster"
        return ApiRefusedError(problem, response.status, answer.message, retry_after_s or None)


@contextlib.asynccontextmanager
async def open_session() -> AsyncGenerator[aiohttp.ClientSession]:
    """For `ApiConnection`: a connection of its own for each request."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield session


async def read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of an answer as they come, without their ends.

    Raises:
        KubernetesApiError: a line of more than `MAX_LINE_BYTES`.
    """
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            raise KubernetesApiError(f"a line of more than {MAX_LINE_BYTES} bytes")
    if rest:
        yield rest


def _describe(error: Exception) -> str:
    """Without the addresses of objects that aiohttp writes: the same failure, the same text."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return str(error.certificate_error)
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


async def _read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > max_bytes:
            raise KubernetesApiError(f"an answer of more than {max_bytes} bytes")
    return bytes(body)
