"""The EndpointSlices of a Kubernetes Service as the API sends them, and the workers in them.

What is decoded is what the API `discovery.k8s.io/v1` defines; other fields are ignored. No I/O.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import ProtocolError
from baton.gateway.options import WorkerAddress
from baton.net.kubernetes.objects import (
    Name,
    ObjectMetadata,
    ObjectPage,
    decode_object,
    decode_status,
)
from baton.protocol.members import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from baton.protocol.worker_http import Role

DEFAULT_PORT_NAME: Final = "http"
"""Of a Service with several ports, unless another one is asked for."""
_LEVEL: Final = re.compile(r"[A-Za-z0-9._:-]{1,253}")
FAMILIES: Final = {"IPv4": 4, "IPv6": 6}


class Conditions(msgspec.Struct, frozen=True):
    """Of an endpoint. None, by the API's definition: ready; serving as `ready`; not terminating."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    """The pod behind an endpoint."""

    uid: Name = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One pod. Consumers use the first of its addresses."""

    addresses: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=100)]
    conditions: Conditions | None = None
    target_ref: TargetRef | None = None
    node_name: str | None = None
    zone: str | None = None

    @property
    def topology(self) -> str:
        """`zone//host`, as far as the API knows them."""
        zone, node = (
            name if name and _LEVEL.fullmatch(name) else "" for name in (self.zone, self.node_name)
        )
        return f"{zone}//{node}".rstrip("/")

    @property
    def is_serving(self) -> bool:
        """Whether it passes its readiness probe, terminating or not."""
        conditions = self.conditions or Conditions()
        if conditions.serving is not None:
            return conditions.serving
        return conditions.ready is not False

    @property
    def is_terminating(self) -> bool:
        """Whether it has to end."""
        return self.conditions is not None and self.conditions.terminating is True


class EndpointPort(msgspec.Struct, frozen=True, rename="camel"):
    """One port of all endpoints of a slice."""

    name: Name | None = None
    port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    app_protocol: Name | None = None

    @property
    def scheme(self) -> str:
        """TLS, unless the Service's port has the application protocol http."""
        return "http" if self.app_protocol == "http" else "https"


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """Some of a Service's endpoints; the API writes null for an empty list."""

    metadata: ObjectMetadata
    address_type: Name = "IPv4"
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=1000)] | None = None
    ports: Annotated[tuple[EndpointPort, ...], Meta(max_length=100)] | None = None


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Nothing has changed up to here."""

    version: str


@dataclass(frozen=True, slots=True)
class SlicePut:
    """A slice was added or changed."""

    version: str
    found: EndpointSlice


@dataclass(frozen=True, slots=True)
class SliceRemoved:
    """A slice is gone."""

    version: str
    name: str


@dataclass(frozen=True, slots=True)
class WatchFailed:
    """The server ends the watch; `code` is an HTTP status."""

    code: int
    message: str


Change: TypeAlias = Bookmark | SlicePut | SliceRemoved


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


def decode_page(body: bytes) -> ObjectPage[EndpointSlice]:
    """One page of a list.

    Raises:
        ProtocolError: it is none.
    """
    return decode_object(body, ObjectPage[EndpointSlice])


def decode_event(line: bytes) -> Change | WatchFailed:
    """One line of a watch.

    Raises:
        ProtocolError: it is no event of EndpointSlices.
    """
    event = decode_object(line, _Event)
    match event.type:
        case "ADDED" | "MODIFIED":
            found = decode_object(event.object, EndpointSlice)
            return SlicePut(found.metadata.resource_version, found)
        case "DELETED":
            gone = decode_object(event.object, EndpointSlice).metadata
            return SliceRemoved(gone.resource_version, gone.name)
        case "BOOKMARK":
            return Bookmark(decode_object(event.object, EndpointSlice).metadata.resource_version)
        case "ERROR":
            status = decode_status(event.object)
            return WatchFailed(status.code, status.message)
        case _:
            raise ProtocolError(f"the API server sent an event of the type {event.type[:64]!r}")


class ServiceWorkers:
    """The workers of one Service, as its slices change. Owner: its source.

    A pod is listed once it is ready, and from then on as long as a slice names it: one that fails
    its readiness probe later, or whose node has lost the API server, may serve all the same, and
    gateways probe workers themselves. A terminating pod is draining.

    `port` is a port's number or name; None: the only one, or the one called `DEFAULT_PORT_NAME`.
    """

    def __init__(self, role: Role, port: str | None) -> None:
        self._role, self._port = role, port
        self._slices: dict[str, EndpointSlice] = {}
        self._listed: frozenset[tuple[str, str]] = frozenset()
        self.workers: frozenset[WorkerAddress] = frozenset()

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Take a whole list.

        Raises:
            ProtocolError: as of `put`.
        """
        self._slices = {found.metadata.name: found for found in slices}
        self._refresh()

    def put(self, changed: EndpointSlice) -> None:
        """Take a slice that was added or changed.

        Raises:
            ProtocolError: too many workers, an address that is none, or a port that the Service
                does not have. `workers` stays as it was.
        """
        self._slices[changed.metadata.name] = changed
        self._refresh()

    def remove(self, name: str) -> None:
        """Forget a slice."""
        self._slices.pop(name, None)
        self._refresh()

    def _refresh(self) -> None:
        # By URL, as an endpoint that moves between slices is in both for a while. Terminating is
        # the later of two states.
        draining: dict[str, bool] = {}
        topology: dict[str, str] = {}
        listed: set[tuple[str, str]] = set()
        for url, endpoint in self._endpoints():
            pod = (url, endpoint.target_ref.uid if endpoint.target_ref else "")
            if endpoint.is_serving or pod in self._listed:
                listed.add(pod)
                topology[url] = endpoint.topology or topology.get(url, "")
                draining[url] = draining.get(url, False) or endpoint.is_terminating
        if len(draining) > MAX_MEMBERS:
            raise ProtocolError(
                f"the Service has {len(draining)} endpoints, more than {MAX_MEMBERS}"
            )
        self._listed = frozenset(listed)
        self.workers = frozenset(
            WorkerAddress(url, self._role, draining=ends, topology=topology[url])
            for url, ends in draining.items()
        )

    def _endpoints(self) -> Iterator[tuple[str, Endpoint]]:
        for found in self._slices.values():
            if not found.endpoints:
                continue
            origin = _origin_format(found, _choose_port(found.ports or (), self._port))
            for endpoint in found.endpoints:
                yield origin.format(_read_address(found, endpoint.addresses[0])), endpoint


def _choose_port(ports: tuple[EndpointPort, ...], wanted: str | None) -> EndpointPort:
    """The port that workers answer HTTP at.

    Raises:
        ProtocolError: there is none, or it is not clear which.
    """
    if wanted is not None and wanted.isdigit():
        number = int(wanted)
        return next((port for port in ports if port.port == number), EndpointPort(port=number))
    if wanted is None and len(ports) == 1 and ports[0].port is not None:
        return ports[0]
    name = wanted or DEFAULT_PORT_NAME
    for port in ports:
        if port.name == name and port.port is not None:
            return port
    names = ", ".join(str(port.name) for port in ports) or "none"
    raise ProtocolError(
        f"the Service has no port {name!r} (its ports: {names}); name one: "
        "kubernetes:ROLE=SERVICE:PORT"
    )


def _origin_format(found: EndpointSlice, port: EndpointPort) -> str:
    host = "[{}]" if found.address_type == "IPv6" else "{}"
    return f"{port.scheme}://{host}:{port.port}"


def _read_address(found: EndpointSlice, text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        address = None
    # A link-local address with a scope is no address in a URL.
    if address is None or "%" in text or FAMILIES.get(found.address_type) != address.version:
        raise ProtocolError(
            f"the EndpointSlice {found.metadata.name} has the address {text[:64]!r}, which is no "
            f"{found.address_type} address that a worker can have"
        )
    return str(address)
