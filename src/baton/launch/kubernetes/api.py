"""What control of a fleet asks of the API server, and its errors as an operator reads them."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from baton.clock import MachineClock
from baton.errors import ProtocolError
from baton.launch.errors import FleetError
from baton.launch.kubernetes.objects import CHART, NAME_LABEL, RELEASE_LABEL, Pod, Workload
from baton.net.kubernetes.access import KubernetesApiError
from baton.net.kubernetes.connection import (
    ApiConnection,
    ApiConnectionError,
    ApiRefusedError,
    ApiRequest,
    read_lines,
)
from baton.net.kubernetes.objects import ObjectPage, decode_object

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    import aiohttp

    from baton.launch.kubernetes.cluster import ClusterAccess
    from baton.launch.kubernetes.objects import WorkloadKind

BUSY_TIMEOUT_S: Final = 30.0
"""For how long a server that asks to be left alone for a while (429, 503) is asked again."""
FOLLOW_S: Final = 300.0
MAX_OBJECT_BYTES: Final = 4 << 20
APPS: Final = "/apis/apps/v1/namespaces/{}"
MERGE_PATCH: Final = "application/merge-patch+json"
RESTARTED_ANNOTATION: Final = "kubectl.kubernetes.io/restartedAt"
"""As `kubectl rollout restart` sets it, so that both are shown alike."""
PLURALS: Final[dict[WorkloadKind, str]] = {
    "StatefulSet": "statefulsets",
    "Deployment": "deployments",
}

T = TypeVar("T")


class KubernetesFleetError(FleetError):
    """A request to the API server failed. `status` None: there was no answer."""

    def __init__(
        self, message: str, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return (
            self.status is None
            or self.status == HTTPStatus.TOO_MANY_REQUESTS
            or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        )


class FleetApi:
    """Requests for one release's objects. Owner: one event loop.

    Raises (all methods):
        KubernetesFleetError: no answer, or a refusal; the message has cause and remedy.
    """

    def __init__(
        self, cluster: ClusterAccess, namespace: str, session: aiohttp.ClientSession
    ) -> None:
        self._connection = ApiConnection(cluster.access, session)
        self._cluster_name, self.namespace = cluster.name, namespace
        self._apps = APPS.format(namespace)
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._clock = MachineClock()

    async def list_pods(self, release: str) -> tuple[Pod, ...]:
        """All pods of a release."""
        selector = f"{NAME_LABEL}={CHART},{RELEASE_LABEL}={release}"

        async def ask() -> tuple[Pod, ...]:
            listed = await self._connection.list_objects(
                "pods", self._pods, selector, lambda body: decode_object(body, ObjectPage[Pod])
            )
            return listed.objects

        return await self._try(ask, "list", "pods")

    async def list_workloads(
        self, kind: WorkloadKind, release: str | None = None
    ) -> tuple[Workload, ...]:
        """The StatefulSets or Deployments of a release; None: of all releases of the chart."""
        plural = PLURALS[kind]
        selector = f"{NAME_LABEL}={CHART}"
        if release is not None:
            selector = f"{selector},{RELEASE_LABEL}={release}"

        async def ask() -> tuple[Workload, ...]:
            listed = await self._connection.list_objects(
                plural,
                f"{self._apps}/{plural}",
                selector,
                lambda body: decode_object(body, ObjectPage[Workload]),
            )
            return tuple(msgspec.structs.replace(each, kind=kind) for each in listed.objects)

        return await self._try(ask, "list", f"{plural}.apps")

    async def set_replicas(self, workload: Workload, num_replicas: int) -> None:
        """Change a workload's size; refused with 409 if it has changed since it was read."""
        plural = _plural(workload)
        patch = {
            "metadata": {"resourceVersion": workload.metadata.resource_version},
            "spec": {"replicas": num_replicas},
        }
        path = f"{self._apps}/{plural}/{workload.name}/scale"
        await self._patch(path, patch, f"{plural}/scale.apps")

    async def restart(self, workload: Workload, at: str) -> None:
        """Have all pods replaced. `at`: the time, of RFC 3339, which names this restart."""
        plural = _plural(workload)
        annotations = {RESTARTED_ANNOTATION: at}
        patch = {"spec": {"template": {"metadata": {"annotations": annotations}}}}
        await self._patch(f"{self._apps}/{plural}/{workload.name}", patch, f"{plural}.apps")

    async def evict(self, pod: Pod) -> None:
        """Have one pod end; refused with 429 while a PodDisruptionBudget does not allow it.

        With 404 or 409 it is gone already: a pod of its name is another one.
        """
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": self.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.metadata.uid}},
        }
        request = ApiRequest(
            f"evict {pod.name}",
            f"{self._pods}/{pod.name}/eviction",
            "POST",
            body=msgspec.json.encode(eviction),
        )
        try:
            await self._connection.fetch(request, MAX_OBJECT_BYTES)
        except KubernetesApiError as exc:
            raise self._describe(exc, "create", "pods/eviction") from exc

    async def read_log(
        self, pod: Pod, num_lines: int | None, since: str | None, *, follow: bool
    ) -> AsyncGenerator[bytes]:
        """Lines with their times before them; with `follow` those that come.

        At most for `FOLLOW_S`, so that a dead connection does not go unnoticed. With `follow` the
        end of this time, or of the connection, is the end of the lines: whether the server is away
        shows when it is asked again. `num_lines` None: all; `since`: a time of RFC 3339.
        """
        container, timeout_s = pod.spec.containers[0].name, FOLLOW_S if follow else BUSY_TIMEOUT_S
        query = {"container": container, "timestamps": "true", "follow": str(follow).lower()}
        if num_lines is not None:
            query["tailLines"] = str(num_lines)
        if since is not None:
            query["sinceTime"] = since
        name, path = f"get the log of {pod.name}", f"{self._pods}/{pod.name}/log"
        request, is_open = ApiRequest(name, path, query=query), False
        try:
            async with self._connection.ask(request, timeout_s) as answer:
                is_open = True
                async for line in read_lines(answer):
                    yield line
        except KubernetesApiError as exc:
            if not (follow and is_open and isinstance(exc, ApiConnectionError)):
                raise self._describe(exc, "get", "pods/log") from exc

    async def _patch(self, path: str, patch: object, resource: str) -> None:
        name = f"patch {path.rpartition('/namespaces/')[2]}"
        body = msgspec.json.encode(patch)
        request = ApiRequest(name, path, "PATCH", body=body, content_type=MERGE_PATCH)
        await self._try(
            lambda: self._connection.fetch(request, MAX_OBJECT_BYTES), "patch", resource
        )

    async def _try(self, ask: Callable[[], Awaitable[T]], verb: str, resource: str) -> T:
        """Ask; again, for a while, if the server states that it is busy."""
        give_up_at = self._clock.now() + BUSY_TIMEOUT_S
        while True:
            try:
                return await ask()
            except (KubernetesApiError, ProtocolError) as exc:
                error = self._describe(exc, verb, resource)
                wait_s = error.retry_after_s
                if wait_s is None or self._clock.now() + wait_s > give_up_at:
                    raise error from exc
            await asyncio.sleep(wait_s)

    def _describe(
        self, error: KubernetesApiError | ProtocolError, verb: str, resource: str
    ) -> KubernetesFleetError:
        where = f"{self._cluster_name}, namespace {self.namespace}"
        if not isinstance(error, ApiRefusedError):
            return KubernetesFleetError(f"{where}: {error}")
        remedy = ""
        if error.status == HTTPStatus.FORBIDDEN:
            remedy = (
                f"; it needs a Role with the verb {verb} on {resource} "
                "(docs/clusters/kubernetes.md has all of them)"
            )
        return KubernetesFleetError(f"{where}: {error}{remedy}", error.status, error.retry_after_s)


def _plural(workload: Workload) -> str:
    assert workload.kind is not None  # noqa: S101 (for mypy): `list_workloads` sets it
    return PLURALS[workload.kind]
