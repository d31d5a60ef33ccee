"""A server that speaks Kubernetes' API for one release, with the controllers that act on it.

Over HTTPS: lists in pages, merge patches with resource versions, the scale and eviction
subresources, logs that are followed, permissions by a Role's rules, and faults that a test asks
for. Its controllers do what Kubernetes' do with StatefulSets and Deployments: they make pods, end
the ones that are too many, and roll templates out, each pod ready after `ready_s` and gone `end_s`
after it had to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime as dt
import json
import ssl
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.integration.kubernetes_api import refuse
from tests.integration.test_gateway_tls import certificate_files
from tests.kubernetes_schemas import validate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
    from pathlib import Path

NAMESPACE = "baton"
APPS = f"/apis/apps/v1/namespaces/{NAMESPACE}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
KINDS = {"statefulsets": "StatefulSet", "deployments": "Deployment"}
CONTROL_S = 0.01
Object = dict[str, Any]


def rfc3339(unix_s: float) -> str:
    """As the API writes times of logs: of one length."""
    moment = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}000Z"


class KubernetesCluster:
    """One namespace. `tokens`: what each may do, as rules of a Role; None: everything.

    `failing`: pods whose container waits for this reason. `budget`: how many evictions a
    PodDisruptionBudget allows at present; None: any number. `num_asked` counts requests by verb and
    resource.
    """

    def __init__(self, directory: Path, objects: Iterable[Object]) -> None:
        self.directory = directory
        self._files = certificate_files(directory, 1)
        self.port, self.ready_s, self.end_s = 0, 0.03, 0.03
        self.tokens: dict[str, list[Object] | None] = {"admin": None}
        self.failing: dict[str, str] = {}
        self.budget: int | None = None
        self.fault: Callable[[str, str], web.StreamResponse | None] = lambda _, __: None
        self.num_asked: Counter[str] = Counter()
        self.least_decoding = 1_000_000
        self.workloads: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.logs: dict[str, list[str]] = {}
        self._since: dict[str, float] = {}
        self._version = 0
        self._num_made: Counter[str] = Counter()
        for found in objects:
            if found["kind"] in KINDS.values():
                self._add(copy.deepcopy(found))

    def size(self, name: str) -> int:
        """A workload's wanted number of pods."""
        return int(self.workloads[name]["spec"]["replicas"])

    def set_size(self, name: str, replicas: int) -> None:
        """As another client's change."""
        self._change(self.workloads[name], replicas=replicas)

    def write_kubeconfig(self, path: Path, **user: Any) -> Path:
        """A kubeconfig of this cluster (JSON is YAML), whose user has `user`."""
        path.write_text(
            json.dumps({
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "contexts": [
                    {
                        "name": "test",
                        "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE},
                    }
                ],
                "clusters": [
                    {
                        "name": "c",
                        "cluster": {
                            "server": f"https://127.0.0.1:{self.port}",
                            "certificate-authority": "tls.crt",
                        },
                    }
                ],
                "users": [{"name": "u", "user": user or {"token": "admin"}}],
            })
        )
        return path

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Listen, at the same port each time, with all pods ready; the controllers run."""
        app = web.Application()
        app.router.add_get(PODS, self._list_pods)
        app.router.add_get(PODS + "/{name}/log", self._read_log)
        app.router.add_post(PODS + "/{name}/eviction", self._evict)
        app.router.add_get(APPS + "/{plural}", self._list_workloads)
        app.router.add_patch(APPS + "/{plural}/{name}", self._patch)
        app.router.add_patch(APPS + "/{plural}/{name}/scale", self._scale)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=context).start()
        self.port = runner.addresses[0][1]
        controllers = asyncio.create_task(self._control())
        try:
            yield
        finally:
            controllers.cancel()
            await runner.cleanup()

    def settle(self) -> None:
        """All pods that are wanted are there, and ready."""
        for _ in range(100):
            self._reconcile(time.time() + 1e6)

    # Controllers

    async def _control(self) -> None:
        while True:
            self._reconcile(time.time())
            await asyncio.sleep(CONTROL_S)

    def _reconcile(self, now: float) -> None:
        for pod in list(self.pods.values()):
            self._advance(pod, now)
        for workload in self.workloads.values():
            if workload["kind"] == "StatefulSet":
                self._control_stateful_set(workload)
            else:
                self._control_deployment(workload)
        decoding = sum(
            is_ready(pod) for pod in self.pods.values() if label(pod, "baton/role") == "decode"
        )
        self.least_decoding = min(self.least_decoding, decoding)

    def _advance(self, pod: Object, now: float) -> None:
        """What the kubelet does."""
        metadata, name = pod["metadata"], pod["metadata"]["name"]
        age_s = now - self._since[metadata["uid"]]
        if "deletionTimestamp" in metadata:
            if age_s > self.end_s:
                del self.pods[name]
        elif name in self.failing:
            waiting = {"reason": self.failing[name], "message": "back-off"}
            pod["status"] |= {
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [status(ready=False, waiting=waiting)],
            }
        elif age_s > self.ready_s and not is_ready(pod):
            number = 1 + sum(map(ord, name)) % 200
            mark_ready(pod, f"node-{number}", f"10.1.0.{number}", time.time() - 60)

    def _control_stateful_set(self, workload: Object) -> None:
        name, replicas = workload["metadata"]["name"], workload["spec"]["replicas"]
        revision, present = revision_of(workload), self._pods_of(workload)
        for number in range(replicas):
            if f"{name}-{number}" not in self.pods:
                self._make_pod(workload, f"{name}-{number}", revision)
        for pod in present:
            if int(pod["metadata"]["name"].rpartition("-")[2]) >= replicas:
                self._end(pod)
        present = self._pods_of(workload)
        old = [pod for pod in present if label(pod, "controller-revision-hash") != revision]
        if old and all(map(is_ready, present)):  # one at a time, the last first
            self._end(max(old, key=lambda pod: pod["metadata"]["name"]))
        before = workload["status"].get("currentRevision", revision)
        is_done = not old and all(map(is_ready, present))
        self._report(
            workload,
            present,
            revision,
            {
                "currentRevision": revision if is_done else before,
                "updateRevision": revision,
            },
        )

    def _control_deployment(self, workload: Object) -> None:
        name, replicas = workload["metadata"]["name"], workload["spec"]["replicas"]
        revision, present = revision_of(workload), self._pods_of(workload)
        living = [pod for pod in present if "deletionTimestamp" not in pod["metadata"]]
        new = [pod for pod in living if label(pod, "controller-revision-hash") == revision]
        old = [pod for pod in living if pod not in new]
        if len(new) < replicas and len(living) <= replicas:
            self._num_made[name] += 1
            self._make_pod(workload, f"{name}-{revision}-{self._num_made[name]}", revision)
        elif len(new) > replicas:
            self._end(new[-1])
        elif (old and sum(map(is_ready, living)) > replicas) or (old and replicas == 0):
            self._end(old[0])
        self._report(workload, self._pods_of(workload), revision, {})

    def _report(
        self, workload: Object, pods: list[Object], revision: str, more: Mapping[str, str]
    ) -> None:
        ready = sum(map(is_ready, pods))
        updated = sum(label(pod, "controller-revision-hash") == revision for pod in pods)
        reported = {
            "observedGeneration": workload["metadata"]["generation"],
            "replicas": len(pods),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "updatedReplicas": updated,
            **more,
        }
        if reported != workload["status"]:
            workload["status"] = reported
            self._touch(workload)

    def _make_pod(self, workload: Object, name: str, revision: str) -> None:
        template = copy.deepcopy(workload["spec"]["template"])
        self._version += 1
        uid = f"uid-{self._version}"
        template["metadata"] |= {"name": name, "uid": uid}
        template["metadata"]["labels"]["controller-revision-hash"] = revision
        self._since[uid] = time.time()
        self.pods[name] = {**template, "status": {"phase": "Pending"}}

    def _end(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = rfc3339(time.time())
            self._since[pod["metadata"]["uid"]] = time.time()

    def _pods_of(self, workload: Object) -> list[Object]:
        wanted = workload["spec"]["selector"]["matchLabels"].items()
        return [pod for pod in self.pods.values() if wanted <= pod["metadata"]["labels"].items()]

    # Objects

    def _add(self, workload: Object) -> None:
        workload["spec"].setdefault("replicas", 1)
        workload["metadata"]["generation"] = 1
        workload["status"] = {}
        self._touch(workload)
        self.workloads[workload["metadata"]["name"]] = workload

    def _touch(self, found: Object) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)

    def _change(self, workload: Object, **spec: Any) -> None:
        before = copy.deepcopy(workload["spec"])
        merge(workload["spec"], spec)
        if workload["spec"] != before:
            workload["metadata"]["generation"] += 1
            self._touch(workload)

    # Requests

    def _refuse(self, request: web.Request, verb: str, resource: str) -> web.StreamResponse | None:
        self.num_asked[f"{verb} {resource}"] += 1
        if (answer := self.fault(verb, resource)) is not None:
            return answer
        _, _, token = request.headers.get("authorization", "").partition("Bearer ")
        if token not in self.tokens:
            return refuse(401, "Unauthorized")
        rules = self.tokens[token]
        if rules is not None and not any(
            resource in rule["resources"] and verb in rule["verbs"] for rule in rules
        ):
            return refuse(
                403, f'User "system:serviceaccount:x" cannot {verb} resource "{resource}"'
            )
        return None

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        refused = self._refuse(request, "list", "pods")
        return refused or listed(request, self.pods)

    async def _list_workloads(self, request: web.Request) -> web.StreamResponse:
        plural = request.match_info["plural"]
        of_kind = {n: w for n, w in self.workloads.items() if w["kind"] == KINDS[plural]}
        return self._refuse(request, "list", plural) or listed(request, of_kind)

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        return await self._patched(request, request.match_info["plural"])

    async def _scale(self, request: web.Request) -> web.StreamResponse:
        return await self._patched(request, f"{request.match_info['plural']}/scale")

    async def _patched(self, request: web.Request, resource: str) -> web.StreamResponse:
        if (refused := self._refuse(request, "patch", resource)) is not None:
            return refused
        assert request.content_type == "application/merge-patch+json"
        patch = await request.json()
        workload = self.workloads.get(request.match_info["name"])
        if workload is None:
            return refuse(404, "not found")
        version = patch.get("metadata", {}).get("resourceVersion")
        if version not in {None, workload["metadata"]["resourceVersion"]}:
            return refuse(409, "the object has been modified; please apply your changes to it")
        self._change(workload, **patch["spec"])
        validate(without_status(workload))
        return web.json_response(without_status(workload))

    async def _evict(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refuse(request, "create", "pods/eviction")) is not None:
            return refused
        body, pod = await request.json(), self.pods.get(request.match_info["name"])
        validate(body)
        if pod is None:
            return refuse(404, "not found")
        if body["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"]:
            return refuse(409, "the UID in the precondition does not match")
        if self.budget is not None:
            if self.budget <= 0:
                return refuse(429, "Cannot evict pod as it would violate the disruption budget.")
            self.budget -= 1
        self._end(pod)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _read_log(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refuse(request, "get", "pods/log")) is not None:
            return refused
        name, query = request.match_info["name"], request.query
        assert query["timestamps"] == "true"
        assert query["container"] in {"worker", "gateway"}
        if name not in self.pods:
            return refuse(404, f'pods "{name}" not found')
        lines = self.logs.setdefault(name, [])
        position = max(0, len(lines) - int(query.get("tailLines", len(lines))))
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            for line in lines[position:]:
                if line == "":  # the container ends here
                    lines.remove(line)
                    return response
                if line == "lost":  # the connection is
                    lines.remove(line)
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if line.partition(" ")[0][:19] >= query.get("sinceTime", "")[:19]:  # by seconds
                    await response.write(line.encode() + b"\n")
            position = len(lines)
            if query["follow"] != "true":
                return response
            await asyncio.sleep(CONTROL_S)


def mark_ready(pod: Object, node: str, address: str, started_at: float) -> None:
    """As the kubelet reports it."""
    pod["spec"]["nodeName"] = node
    running = {"startedAt": rfc3339(started_at)}
    pod["status"] = {
        "phase": "Running",
        "podIP": address,
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [status(ready=True, running=running)],
    }


def status(*, ready: bool, **state: Any) -> Object:
    """Of a container."""
    return {"ready": ready, "started": ready, "restartCount": 0, "state": state}


def is_ready(pod: Object) -> bool:
    """Whether it serves, and does not have to end."""
    conditions = pod["status"].get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        (each["type"], each["status"]) == ("Ready", "True") for each in conditions
    )


def label(pod: Object, name: str) -> str:
    """Of a pod."""
    return str(pod["metadata"]["labels"].get(name, ""))


def revision_of(workload: Object) -> str:
    """Names a template."""
    return f"{hash(json.dumps(workload['spec']['template'], sort_keys=True)) & 0xFFFFFFFF:08x}"


def merge(target: Object, patch: Mapping[str, Any]) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = value


def without_status(found: Object) -> Object:
    return {key: value for key, value in found.items() if key != "status"}


def listed(request: web.Request, objects: Mapping[str, Object]) -> web.Response:
    """One page of those that the selector takes; lists have no kind in their items."""
    wanted = dict(pair.split("=") for pair in request.query["labelSelector"].split(",")).items()
    taken = [each for each in objects.values() if wanted <= each["metadata"]["labels"].items()]
    first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
    rest = str(first + limit) if first + limit < len(taken) else ""
    items = [
        {key: value for key, value in each.items() if key not in {"kind", "apiVersion"}}
        for each in taken[first : first + limit]
    ]
    return web.json_response({
        "metadata": {"resourceVersion": "1", "continue": rest},
        "items": items or None,
    })
