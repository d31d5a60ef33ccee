"""A server that speaks what Baton uses of Kubernetes' API: EndpointSlices, listed and watched.

Over HTTPS, with tokens, pages, resource versions that expire, and faults that a test asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiohttp import web

from baton.net.kubernetes.access import ServiceAccount
from tests.integration.test_gateway_tls import certificate_files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from pathlib import Path

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
SERVICE = "kubernetes.io/service-name"


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    """A pod; without conditions it is ready."""
    return {
        "addresses": [address],
        "conditions": conditions,
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "name": address, "uid": f"uid-{address}"},
    }


def endpoint_slice(
    name: str, service: str, endpoints: Iterable[dict[str, Any]], port: int, scheme: str
) -> dict[str, Any]:
    """A slice of a Service, as the API has it."""
    return {
        "metadata": {"name": name, "labels": {SERVICE: service}},
        "addressType": "IPv4",
        "endpoints": list(endpoints) or None,
        "ports": [
            {"name": "http", "port": port, "protocol": "TCP", "appProtocol": scheme},
            {"name": "handoff", "port": 7100, "protocol": "TCP"},
        ],
    }


class KubernetesApi:
    """One namespace, `default`. `account` is the directory of a pod's service account.

    `num_asked` counts requests by verb, `num_faults` those that met the fault.
    """

    def __init__(self, directory: Path) -> None:
        self.account = directory / "account"
        self.account.mkdir()
        self._files = certificate_files(directory, 1)
        (self.account / "ca.crt").write_bytes(self._files[0].read_bytes())
        (self.account / "namespace").write_text("default", encoding="ascii")
        self.set_token("first")
        self.write_token("first")
        self.port = 0
        self.num_asked: Counter[str] = Counter()
        self.num_faults = 0
        self.fault: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.faulty_verb = "watch"
        self._slices: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._version, self._oldest = 1, 0
        self._changed = asyncio.Event()
        self._watches: list[web.Request] = []

    @property
    def api(self) -> ServiceAccount:
        return ServiceAccount(f"https://127.0.0.1:{self.port}", self.account)

    def set_token(self, token: str) -> None:
        """The only token that is accepted from now on."""
        self._token = token

    def write_token(self, token: str) -> None:
        """The token that the pod has from now on."""
        (self.account / "token").write_text(token, encoding="ascii")

    def put(
        self,
        name: str,
        *endpoints: dict[str, Any],
        port: int = 8101,
        scheme: str = "https",
        service: str = "workers",
    ) -> None:
        """Add or change a slice."""
        known = name in self._slices
        self._slices[name] = endpoint_slice(name, service, endpoints, port, scheme)
        self._note("MODIFIED" if known else "ADDED", self._slices[name])

    def remove(self, name: str) -> None:
        """Delete a slice."""
        self._note("DELETED", self._slices.pop(name))

    def forget_changes(self) -> None:
        """No watch can begin at an earlier version from now on."""
        self._version += 1
        self._oldest = self._version

    def cut_watches(self) -> int:
        """Break the connections of all watches; how many there were."""
        num_cut = 0
        for request in self._watches:
            if request.transport is not None:
                request.transport.abort()
                num_cut += 1
        return num_cut

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Listen, at the same port each time."""
        app = web.Application()
        app.router.add_get(PATH, self._handle)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield
        finally:
            self.cut_watches()
            await runner.cleanup()

    def _note(self, kind: str, changed: dict[str, Any]) -> None:
        self._version += 1
        changed["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, json.loads(json.dumps(changed))))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if "watch" in request.query else "list"
        self.num_asked[verb] += 1
        if request.headers.get("authorization") != f"Bearer {self._token}":
            return refuse(401, "Unauthorized")
        assert request.match_info["namespace"] == "default"
        if self.fault is not None and self.faulty_verb == verb:
            self.num_faults += 1
            return await self.fault(request)
        return await self._watch(request) if verb == "watch" else self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        names = [name for name in sorted(self._slices) if is_asked(request, self._slices[name])]
        rest = str(first + limit) if first + limit < len(names) else ""
        return web.json_response({
            "kind": "EndpointSliceList",
            "metadata": {"resourceVersion": str(self._version), "continue": rest},
            "items": [self._slices[name] for name in names[first : first + limit]] or None,
        })

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        assert request.query["allowWatchBookmarks"] == "true"
        assert 0 < int(request.query["timeoutSeconds"]) <= 90
        since = int(request.query["resourceVersion"])
        if since < self._oldest:
            return refuse(410, "too old resource version")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        self._watches.append(request)
        try:
            while True:
                changed = self._changed
                for version, kind, found in self._history:
                    if version > since:
                        since = version
                        if is_asked(request, found):
                            await write_event(response, kind, found)
                await changed.wait()
        finally:
            self._watches.remove(request)


def is_asked(request: web.Request, found: dict[str, Any]) -> bool:
    """Whether a slice is of the Service that a request selects."""
    label, _, service = request.query["labelSelector"].partition("=")
    return bool(found["metadata"]["labels"][label] == service)


def refuse(code: int, message: str) -> web.Response:
    """An answer as the API gives them."""
    status = {"kind": "Status", "status": "Failure", "message": message, "code": code}
    return web.json_response(status, status=code)


async def write_event(response: web.StreamResponse, kind: str, found: dict[str, Any]) -> None:
    """One line of a watch."""
    await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")
