"""What a gateway asks of Kubernetes' API server: a Service's EndpointSlices, listed and watched."""

from __future__ import annotations

import contextlib
import random
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.gateway.members.endpoint_slices import WatchFailed, decode_event, decode_page
from baton.net.kubernetes.access import ApiAccess, KubernetesApiError
from baton.net.kubernetes.connection import ApiConnection, ApiRefusedError, ApiRequest, read_lines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    import aiohttp

    from baton.gateway.members.endpoint_slices import Change, EndpointSlice
    from baton.net.kubernetes.connection import Listed

GROUP_PATH: Final = "/apis/discovery.k8s.io/v1"
SERVICE_LABEL: Final = "kubernetes.io/service-name"
WATCH_S: Final = (60, 90)
"""The server ends each watch after a time in this range. It also bounds how long a connection that
is dead, and was never closed, goes unnoticed."""
WATCH_GRACE_S: Final = 15.0

_random = random.SystemRandom()


class ResourceVersionExpiredError(KubernetesApiError):
    """The server does not remember changes since the version that was asked for: list again."""

    def __init__(self) -> None:
        super().__init__("the resource version has expired (410)")


class EndpointSliceApi:
    """Lists and watches the slices of one Service. Owner: the event loop's thread."""

    def __init__(
        self, access: ApiAccess, namespace: str, service: str, session: aiohttp.ClientSession
    ) -> None:
        self._connection, self._namespace = ApiConnection(access, session), namespace
        self._path = f"{GROUP_PATH}/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_LABEL}={service}"

    async def list_slices(self) -> Listed[EndpointSlice]:
        """All slices.

        Raises:
            KubernetesApiError: no answer, or a refusal.
            ProtocolError: one that does not decode.
        """
        with self._refusals("list"):
            return await self._connection.list_objects(
                "endpointslices", self._path, self._selector, decode_page
            )

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
        request = ApiRequest("watch endpointslices", self._path, query=query)
        with self._refusals("watch"):
            async with self._connection.ask(request, watch_s + WATCH_GRACE_S) as response:
                async for line in read_lines(response):
                    if not line.strip():
                        continue
                    change = decode_event(line)
                    if isinstance(change, WatchFailed):
                        raise _refused_watch(change)
                    yield change

    @contextlib.contextmanager
    def _refusals(self, verb: str) -> Generator[None]:
        """Errors of the API server, with what to do."""
        try:
            yield
        except ApiRefusedError as exc:
            if exc.status == HTTPStatus.GONE:
                raise ResourceVersionExpiredError from exc
            if exc.status != HTTPStatus.FORBIDDEN:
                raise
            raise KubernetesApiError(
                f"this pod's service account may not {verb} endpointslices in the namespace "
                f"{self._namespace}: it needs a Role with the verbs get, list and watch on "
                "endpointslices of the API group discovery.k8s.io, and a RoleBinding; its answer: "
                f"{exc.answer or 'none'}"
            ) from exc


def _refused_watch(failed: WatchFailed) -> KubernetesApiError:
    if failed.code == HTTPStatus.GONE:
        return ResourceVersionExpiredError()
    return KubernetesApiError(f"the watch ended with {failed.code}: {failed.message}")
