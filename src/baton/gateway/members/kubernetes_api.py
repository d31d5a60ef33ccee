"""What Baton asks of a Kubernetes API server: a Service's EndpointSlices, listed and watched.

With the service account of this pod. Its token and the authority's certificate are read again for
each connection, since both are replaced while the pod runs. Everything that is received is bounded.
"""

from __future__ import annotations

import contextlib
import random
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp

from baton.errors import BatonError, ConfigError
from baton.gateway.members.endpoint_slices import (
    WatchFailed,
    decode_event,
    decode_page,
    decode_status,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from baton.gateway.members.endpoint_slices import Change, EndpointSlice

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's service account: `token`, `ca.crt`, `namespace`."""
GROUP_PATH: Final = "/apis/discovery.k8s.io/v1"
SERVICE_LABEL: Final = "kubernetes.io/service-name"
PAGE_ITEMS: Final = 100
MAX_PAGES: Final = 100
MAX_LIST_BYTES: Final = 32 << 20
"""All pages together."""
MAX_EVENT_BYTES: Final = 4 << 20
"""Objects in etcd have 1.5 MiB at most, which are more in JSON."""
MAX_ANSWER_BYTES: Final = 64 << 10
MAX_ACCOUNT_FILE_BYTES: Final = 64 << 10
LIST_TIMEOUT_S: Final = 10.0
WATCH_S: Final = (60, 90)
"""The server ends each watch after a time in this range. It also bounds how long a connection that
is dead, and was never closed, goes unnoticed."""
WATCH_GRACE_S: Final = 15.0

_random = random.SystemRandom()


class KubernetesApiError(BatonError):
    """The API server did not give what was asked for. The same failure has the same message."""

    retryable = True


class ResourceVersionExpiredError(KubernetesApiError):
    """The server does not remember changes since the version that was asked for: list again."""

    def __init__(self) -> None:
        super().__init__("the resource version has expired (410)")


@dataclass(frozen=True, slots=True)
class ListedSlices:
    """All slices, as they were at one version."""

    version: str
    slices: tuple[EndpointSlice, ...]


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is, and the directory of the account that is shown to it.

    `url` is `https://HOST:PORT`.
    """

    url: str
    account: Path

    @classmethod
    def of_pod(cls, environment: Mapping[str, str]) -> ApiServer:
        """The one of the cluster in which this process is a pod.

        Raises:
            ConfigError: this process is no pod.
        """
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        port = environment.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host or not ACCOUNT.is_dir():
            raise ConfigError(
                "a source kubernetes:… works in a pod with a service account alone: set "
                "automountServiceAccountToken for it (there must be the variable "
                f"KUBERNETES_SERVICE_HOST, and {ACCOUNT})"
            )
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", ACCOUNT)

    def find_namespace(self) -> str:
        """The namespace of this pod.

        Raises:
            ConfigError: its file cannot be read.
        """
        try:
            return self._read("namespace").strip()
        except KubernetesApiError as exc:
            raise ConfigError(f"{exc}; write kubernetes:ROLE=NAMESPACE/SERVICE") from exc

    def read_token(self) -> str:
        """The account's bearer token, as it is now.

        Raises:
            KubernetesApiError: it cannot be read.
        """
        return self._read("token").strip()

    def make_tls(self) -> ssl.SSLContext:
        """Trusts the cluster's authority alone, as its file is now.

        Raises:
            KubernetesApiError: the file cannot be read, or is no certificate.
        """
        path, authority = self.account / "ca.crt", self._read("ca.crt")
        if not authority.strip():  # Python would trust the system's authorities
            raise KubernetesApiError(f"{path} is empty")
        try:
            return ssl.create_default_context(cadata=authority)
        except ssl.SSLError as exc:
            raise KubernetesApiError(f"{path} is no certificate: {exc}") from exc

    def _read(self, name: str) -> str:
        path = self.account / name
        try:
            with path.open("rb") as file:
                content = file.read(MAX_ACCOUNT_FILE_BYTES + 1)
            text = content.decode("ascii")
        except (OSError, UnicodeDecodeError) as exc:
            raise KubernetesApiError(f"cannot read {path}: {exc}") from exc
        if len(content) > MAX_ACCOUNT_FILE_BYTES:
            raise KubernetesApiError(f"{path} has more than {MAX_ACCOUNT_FILE_BYTES} bytes")
        return text


class EndpointSliceApi:
    """Lists and watches the slices of one Service. Owner: the event loop's thread."""

    def __init__(
        self, server: ApiServer, namespace: str, service: str, session: aiohttp.ClientSession
    ) -> None:
        self._server, self._namespace, self._session = server, namespace, session
        self._url = f"{server.url}{GROUP_PATH}/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_LABEL}={service}"

    async def list_slices(self) -> ListedSlices:
        """All slices; at most `LIST_TIMEOUT_S` for each page.

        Raises:
            KubernetesApiError: no answer, or a refusal.
            ProtocolError: one that does not decode.
        """
        query = {"labelSelector": self._selector, "limit": str(PAGE_ITEMS)}
        slices: list[EndpointSlice] = []
        room_bytes = MAX_LIST_BYTES
        for _ in range(MAX_PAGES):
            async with self._ask("list", query, LIST_TIMEOUT_S) as response:
                body = await _read_bounded(response, room_bytes)
            room_bytes -= len(body)
            page = decode_page(body)
            slices += page.items or ()
            if not page.metadata.continue_token:
                return ListedSlices(page.metadata.resource_version, tuple(slices))
            query["continue"] = page.metadata.continue_token
        raise KubernetesApiError(f"the list has more than {MAX_PAGES} pages")

    async def watch_slices(self, version: str) -> AsyncGenerator[Change]:
        """Changes since `version`, until the server ends the watch.

        Raises:
            ResourceVersionExpiredError: the server does not remember `version`.
            KubernetesApiError: no answer, a refusal, or a connection that broke.
            ProtocolError: an event that does not decode.
        """
        watch_s = _random.randint(*WATCH_S)
        query = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(watch_s),
        }
        async with self._ask("watch", query, watch_s + WATCH_GRACE_S) as response:
            async for line in _read_lines(response):
                change = decode_event(line)
                if isinstance(change, WatchFailed):
                    raise _refused_watch(change)
                yield change

    @contextlib.asynccontextmanager
    async def _ask(
        self, verb: str, query: Mapping[str, str], timeout_s: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        headers = {
            "authorization": f"Bearer {self._server.read_token()}",
            "accept": "application/json",
            "accept-encoding": "identity",
        }
        tls = self._server.make_tls()
        try:
            async with self._session.get(
                self._url,
                params=query,
                headers=headers,
                ssl=tls,
                allow_redirects=False,  # the token is for this server alone
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=LIST_TIMEOUT_S),
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise await self._refused(verb, response)
                yield response
        except aiohttp.ClientSSLError as exc:
            raise KubernetesApiError(
                f"TLS with {self._server.url} failed: {_describe(exc)}"
            ) from exc
        except TimeoutError as exc:
            raise KubernetesApiError(f"{self._server.url} has not answered {verb} in time") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise KubernetesApiError(f"{self._server.url}: {_describe(exc)}") from exc

    async def _refused(self, verb: str, response: aiohttp.ClientResponse) -> KubernetesApiError:
        status = response.status
        if status == HTTPStatus.GONE:
            return ResourceVersionExpiredError()
        answer = decode_status(await _read_bounded(response, MAX_ANSWER_BYTES)).message
        match status:
            case HTTPStatus.FORBIDDEN:
                remedy = (
                    f"this pod's service account may not {verb} endpointslices in the namespace "
                    f"{self._namespace}: it needs a Role with the verbs get, list and watch on "
                    "endpointslices of the API group discovery.k8s.io, and a RoleBinding"
                )
            case HTTPStatus.UNAUTHORIZED:
                account = self._server.account
                remedy = f"the token in {account} was refused: expired, or of another cluster"
            case _:
                remedy = f"HTTP {status} to {verb} endpointslices"
        return KubernetesApiError(f"{remedy}; its answer: {answer or 'none'}")


@contextlib.asynccontextmanager
async def open_session() -> AsyncGenerator[aiohttp.ClientSession]:
    """For `EndpointSliceApi`: a connection of its own for each request, with the newest files."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield session


def _describe(error: Exception) -> str:
    """Without the addresses of objects that aiohttp writes: the same failure, the same text."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return str(error.certificate_error)
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


def _refused_watch(failed: WatchFailed) -> KubernetesApiError:
    if failed.code == HTTPStatus.GONE:
        return ResourceVersionExpiredError()
    return KubernetesApiError(f"the watch ended with {failed.code}: {failed.message}")


async def _read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > max_bytes:
            raise KubernetesApiError(f"an answer of more than {max_bytes} bytes")
    return bytes(body)


async def _read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MAX_EVENT_BYTES:
            raise KubernetesApiError(f"an event of more than {MAX_EVENT_BYTES} bytes")
