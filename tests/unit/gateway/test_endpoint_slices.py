"""Which workers a Service's EndpointSlices list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import MachineClock
from baton.errors import ConfigError, ProtocolError
from baton.gateway.members import endpoint_slices
from baton.gateway.members.endpoint_slices import (
    Conditions,
    Endpoint,
    EndpointPort,
    EndpointSlice,
    ServiceWorkers,
    TargetRef,
)
from baton.gateway.members.interface import SourceStatus
from baton.gateway.members.kubernetes import KubernetesSource, Pauses, ServiceTarget
from baton.net.kubernetes import access
from baton.net.kubernetes.access import ServiceAccount
from baton.net.kubernetes.objects import ObjectMetadata
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from baton.gateway.options import WorkerAddress

HTTP = EndpointPort(name="http", port=8101, app_protocol="https")
HANDOFF = EndpointPort(name="handoff", port=7100)


def pod(address: str, uid: str = "", **conditions: bool | None) -> Endpoint:
    return Endpoint((address,), Conditions(**conditions), TargetRef(uid))


def slice_of(
    *endpoints: Endpoint,
    name: str = "a",
    ports: tuple[EndpointPort, ...] = (HTTP, HANDOFF),
    address_type: str = "IPv4",
) -> EndpointSlice:
    return EndpointSlice(ObjectMetadata(name), address_type, endpoints, ports)


def urls(workers: frozenset[WorkerAddress]) -> dict[str, bool]:
    return {worker.url: worker.draining for worker in workers}


def found(*slices: EndpointSlice, port: str | None = None) -> dict[str, bool]:
    workers = ServiceWorkers(Role.DECODE, port)
    workers.replace(slices)
    return urls(workers.workers)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, {"https://10.0.0.1:8101": False}),  # unknown counts as ready
        ({"ready": True}, {"https://10.0.0.1:8101": False}),
        ({"ready": False}, {}),
        ({"ready": True, "serving": True, "terminating": False}, {"https://10.0.0.1:8101": False}),
        ({"ready": False, "serving": True, "terminating": True}, {"https://10.0.0.1:8101": True}),
        ({"ready": False, "serving": False, "terminating": True}, {}),
    ],
)
def test_conditions(conditions, expected):
    assert found(slice_of(pod("10.0.0.1", **conditions))) == expected


def test_the_apis_json_is_decoded():
    body = b"""{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
      "metadata": {"resourceVersion": "7", "continue": "more", "remainingItemCount": 3},
      "items": [{"metadata": {"name": "workers-x", "resourceVersion": "5", "labels": {}},
        "addressType": "IPv6", "ports": [{"name": "", "port": 8101, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["fd00::1"], "conditions": {"ready": true}, "zone": "z",
          "targetRef": {"kind": "Pod", "uid": "u"}, "hints": null}]},
       {"metadata": {"name": "empty"}, "addressType": "IPv4", "endpoints": null, "ports": null}]}"""
    page = endpoint_slices.decode_page(body)
    assert (page.metadata.resource_version, page.metadata.continue_token) == ("7", "more")
    assert page.items is not None
    assert found(*page.items) == {"https://[fd00::1]:8101": False}


@pytest.mark.parametrize(
    ("ports", "wanted", "expected"),
    [
        ((HTTP, HANDOFF), None, "https://10.0.0.1:8101"),
        ((EndpointPort(name="", port=9),), None, "https://10.0.0.1:9"),
        ((HTTP, HANDOFF), "handoff", "https://10.0.0.1:7100"),
        ((HTTP, HANDOFF), "8101", "https://10.0.0.1:8101"),
        ((), "8200", "https://10.0.0.1:8200"),
        ((EndpointPort(name="http", port=80, app_protocol="http"),), "80", "http://10.0.0.1:80"),
    ],
)
def test_ports(ports, wanted, expected):
    assert found(slice_of(pod("10.0.0.1"), ports=ports), port=wanted) == {expected: False}


@pytest.mark.parametrize(
    ("given_slice", "said"),
    [
        (slice_of(pod("10.0.0.1"), ports=()), "no port 'http' .its ports: none"),
        (slice_of(pod("10.0.0.1"), ports=(HANDOFF, EndpointPort(name="x", port=1))), "handoff, x"),
        (slice_of(pod("metadata.internal")), "no IPv4 address"),
        (slice_of(pod("fd00::1")), "no IPv4 address"),
        (slice_of(pod("workers.example"), address_type="FQDN"), "no FQDN address"),
        (slice_of(pod("fe80::1%eth0"), address_type="IPv6"), "no IPv6 address"),
    ],
)
def test_what_cannot_be_used_is_said_and_changes_nothing(given_slice, said):
    workers = ServiceWorkers(Role.DECODE, None)
    workers.put(slice_of(pod("10.0.0.9"), name="good"))
    before = workers.workers
    with pytest.raises(ProtocolError, match=said):
        workers.put(given_slice)
    assert workers.workers == before != frozenset()


def test_the_number_of_workers_is_bounded(monkeypatch):
    monkeypatch.setattr(endpoint_slices, "MAX_MEMBERS", 2)
    pods = [pod(f"10.0.0.{number}") for number in range(3)]
    assert len(found(slice_of(*pods[:2]))) == 2
    with pytest.raises(ProtocolError, match="3 endpoints, more than 2"):
        found(slice_of(*pods))


def test_a_pod_that_was_ready_stays_until_no_slice_names_it():
    workers = ServiceWorkers(Role.DECODE, None)
    workers.replace([slice_of(pod("10.0.0.1", "u"))])
    workers.put(slice_of(pod("10.0.0.1", "u", ready=False)))  # its node lost the API server
    assert urls(workers.workers) == {"https://10.0.0.1:8101": False}
    workers.put(slice_of(pod("10.0.0.1", "another", ready=False)))  # loads
    assert not workers.workers


states = st.builds(
    pod,
    st.sampled_from([f"10.0.0.{number}" for number in range(4)]),
    st.sampled_from(["u", "v"]),
    ready=st.sampled_from([True, False, None]),
    serving=st.sampled_from([True, False, None]),
    terminating=st.sampled_from([True, False, None]),
)
changes = st.tuples(st.sampled_from("ab"), st.none() | st.lists(states, max_size=4))


@given(st.lists(changes, max_size=12))
def test_any_order_of_changes_lists_what_a_simple_model_lists(steps):
    workers = ServiceWorkers(Role.DECODE, None)
    slices: dict[str, list[Endpoint]] = {}
    listed: set[tuple[str, str]] = set()
    for name, endpoints in steps:
        if endpoints is None:
            workers.remove(name)
            slices.pop(name, None)
        else:
            workers.put(slice_of(*endpoints, name=name))
            slices[name] = endpoints
        present = [(one.addresses[0], one) for pods in slices.values() for one in pods]
        passing = [
            (address, one)
            for address, one in present
            if (address, one.target_ref.uid) in listed
            or one.conditions.serving
            or (one.conditions.serving is None and one.conditions.ready is not False)
        ]
        listed = {(address, one.target_ref.uid) for address, one in passing}
        ending = {address for address, one in passing if one.conditions.terminating}
        expected = {f"https://{address}:8101": address in ending for address, _ in passing}
        assert urls(workers.workers) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decode=workers", ServiceTarget(Role.DECODE, "workers")),
        ("both=workers:http", ServiceTarget(Role.BOTH, "workers", None, "http")),
        ("prefill=other/workers:8101", ServiceTarget(Role.PREFILL, "workers", "other", "8101")),
    ],
)
def test_targets(text, expected):
    assert ServiceTarget.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "workers",
        "gateway=workers",
        "decode=",
        "decode=../x",
        "decode=a/b/c",
        "decode=A",
        "both=x:65536",
    ],
)
def test_a_target_that_is_not_understood_is_refused(text):
    with pytest.raises(ConfigError, match=r"kubernetes:ROLE=\[NAMESPACE/\]SERVICE\[:PORT\]"):
        ServiceTarget.parse(text)


def test_outside_a_pod_the_source_says_what_it_needs(tmp_path):
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        ServiceAccount.of_pod({})
    status, target = SourceStatus("x", MachineClock()), ServiceTarget.parse("decode=x")
    with pytest.raises(ConfigError, match="NAMESPACE/SERVICE"):
        KubernetesSource(target, ServiceAccount("https://x", tmp_path), status)


def test_the_servers_address_comes_from_the_pods_variables(tmp_path, monkeypatch):
    monkeypatch.setattr(access, "ACCOUNT", tmp_path)
    address = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT_HTTPS": "6443"}
    assert ServiceAccount.of_pod(address).url == "https://[fd00::1]:6443"


def test_pauses_grow_to_a_bound_and_differ():
    pauses = Pauses(first_s=1, max_s=8)
    assert [pauses.delay_s(number, 0.5) for number in (1, 2, 3, 4, 5, 10_000)] == [1, 2, 4, 8, 8, 8]
    assert pauses.delay_s(4, 0) == 4
    assert pauses.delay_s(4, 1) == 12


@pytest.mark.parametrize(
    ("zone", "node_name", "topology"),
    [
        ("eu-1a", "node-1.local", "eu-1a//node-1.local"),
        ("eu-1a", None, "eu-1a"),
        (None, "node-1", "//node-1"),
        (None, None, ""),
        ("no/zone", "node-1", "//node-1"),
    ],
)
def test_zone_and_node_are_a_workers_topology(zone, node_name, topology):
    endpoint = {"addresses": ["10.0.0.1"], "zone": zone, "nodeName": node_name}
    slice_ = msgspec.convert(
        {
            "metadata": {"name": "a"},
            "endpoints": [{name: each for name, each in endpoint.items() if each is not None}],
            "ports": [{"name": "http", "port": 8101}],
        },
        EndpointSlice,
    )
    workers = ServiceWorkers(Role.DECODE, None)
    workers.replace([slice_])
    assert {worker.topology for worker in workers.workers} == {topology}
