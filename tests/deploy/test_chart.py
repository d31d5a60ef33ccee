"""The Helm chart, rendered by Helm: valid for Kubernetes, and what Baton itself understands."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml

from baton.auth.issuing import Order, create_authority, issue
from baton.cli.engine_options import engine_options
from baton.cli.gateway import GatewayFlags, gateway_options
from baton.cli.main import build_app
from baton.cli.picker import PickerFlags
from baton.cli.worker import _options as worker_options
from baton.engines.vllm.arguments import LaunchParameters, server_arguments
from baton.engines.vllm.options import VllmOptions
from baton.gateway.members.kubernetes import ServiceTarget
from baton.gateway.openapi import describe
from baton.launch.ray.plan import plan_fleet
from baton.net.kubernetes import access
from baton.net.probes import ProbeApp
from baton.ops.gateway_pages import MANAGEMENT_KEY_VARIABLE
from scripts.render_chart import CHART, RENDERED, ROOT, compute_digest, list_values
from tests.deploy.manifests import environment_of, find, is_selected, workloads

if TYPE_CHECKING:
    from baton.config.sections import Config
    from tests.deploy.manifests import Object, Workload

pytest.importorskip("kubernetes_validate")
schemas = importlib.import_module("tests.kubernetes_schemas")

OLDEST, NEWEST = "1.30", "1.37"
"""Of Kubernetes: what Chart.yaml asks for at least, and the newest schemas at hand."""
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
NAMES = [path.stem for path in list_values()]
PODS = [name for name in NAMES if name != "ray"]
TEXT = {name: (RENDERED / f"{name}.yaml").read_text(encoding="utf-8") for name in NAMES}
OBJECTS: dict[str, list[Object]] = {
    name: [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]
    for name, text in TEXT.items()
}
ALL_PODS = [
    pytest.param(workload, id=f"{name}:{workload.name}")
    for name in NAMES
    for workload in workloads(OBJECTS[name])
]


def is_autoscale(workload: Workload) -> bool:
    return workload.labels["app.kubernetes.io/component"] == "autoscale"


BATON_PODS = [
    pytest.param(name, workload, id=f"{name}:{workload.name}")
    for name in PODS
    for workload in workloads(OBJECTS[name])
    if not is_autoscale(workload)
]


RENDER = """
import json, pathlib, sys
from scripts.render_chart import ChartError, render, render_kept
results = {}
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        results[path.name] = render_kept(path) if path.parent.name == "values" else render(path)
    except ChartError as exc:
        results[path.name] = "refused: " + str(exc)
json.dump(results, sys.stdout)
"""


def render_by_helm(*values: Path) -> dict[str, str]:
    """By file name; in a process of its own, as Helm brings the runtime of another language."""
    pytest.importorskip("helm_python", reason="pip install helm-python-sdk: Helm as a library")
    command = [sys.executable, "-c", RENDER, *map(str, values)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    return dict(json.loads(done.stdout))


def test_the_manifests_that_are_kept_are_those_of_this_chart():
    assert {path.stem for path in RENDERED.glob("*.yaml")} == set(NAMES)
    for name, text in TEXT.items():
        line = f"# Chart and values: sha256 {compute_digest(name)}"
        assert line in text.splitlines(), "run: python scripts/render_chart.py"


def test_helm_renders_what_is_kept():
    rendered = render_by_helm(*list_values())
    assert rendered == {f"{name}.yaml": text for name, text in TEXT.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_valid(name):
    for found in OBJECTS[name]:
        match found["kind"]:
            case "RayCluster" | "ServiceMonitor" | "PrometheusRule" | "InferencePool":
                pass  # not Kubernetes' own: below
            case _:
                schemas.validate(found)
                if name == "vllm-many":
                    schemas.validate(found, NEWEST)


def test_validation_finds_a_field_that_does_not_exist():
    deployment = copy.deepcopy(find(OBJECTS["small"], "Deployment")[0])
    deployment["spec"]["template"]["spec"]["containers"][0]["portz"] = []
    with pytest.raises(schemas.ValidationError):
        schemas.validate(deployment)


@pytest.mark.parametrize("workload", ALL_PODS)
def test_a_pod_is_valid_by_itself_and_has_no_privileges(workload: Workload):
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(workload.template)}
    pod["metadata"]["name"] = "x"
    schemas.validate(pod)
    security, spec = workload.spec["securityContext"], workload.spec
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] > 1000
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    own = workload.container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert spec["automountServiceAccountToken"] is (workload.owner["kind"] == "Deployment")
    assert spec["enableServiceLinks"] is False
    assert workload.container["resources"]["limits"]["memory"]
    for path, volume in workload.mounted():
        assert "hostPath" not in volume, path
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] & 0o007 == 0


@pytest.fixture
def container_files(tmp_path: Path) -> Path:
    """What the container's /etc/baton has: secrets of every kind."""
    root = tmp_path / "etc"
    (root / "cluster").mkdir(parents=True)
    (root / "cluster" / "key").write_text("ab" * 32, encoding="ascii")
    (root / "cluster" / "key").chmod(0o600)
    for name in ("config", "clients", "tls", "management"):
        (root / name).mkdir()
    (root / "management" / "key").write_text("cd" * 32, encoding="ascii")
    create_authority(tmp_path / "ca")
    return root


def settings_of(
    objects: list[Object], workload: Workload, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Config:
    """What the container's command line, variables and file come to, by Baton's own rules."""
    prepare(objects, workload, root, monkeypatch)
    program, *arguments = workload.container["command"]
    assert program == "baton"
    command, bound, _ = build_app().parse_args(arguments)
    flags = bound.arguments.get("flags")
    if flags is None:
        flags = {"gateway": GatewayFlags, "picker": PickerFlags}[command.__name__]()
    return flags.resolve().to_config()


def prepare(
    objects: list[Object], workload: Workload, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give this process the container's variables and its file."""
    config = {volume["name"]: volume for volume in workload.spec["volumes"]}["config"]
    (text,) = (
        found["data"]["baton.toml"]
        for found in find(objects, "ConfigMap", config["configMap"]["name"])
    )
    (root / "config" / "baton.toml").write_text(text, encoding="utf-8")
    for name, value in environment_of(workload, root).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("name", "workload"), BATON_PODS)
def test_baton_understands_each_command(
    name: str, workload: Workload, container_files: Path, tmp_path: Path, monkeypatch
):
    config = settings_of(OBJECTS[name], workload, container_files, monkeypatch)
    is_gateway = workload.owner["kind"] == "Deployment"
    if config.security.identity is not None:
        order = Order(*(("gateway", "g") if is_gateway else ("worker", config.worker.name)))
        issue(order, tmp_path / "ca", Path(config.security.identity))
    else:
        assert config.cluster.key_file is not None
    files = {path for path, volume in workload.mounted() if "secret" in volume}
    ports = {port["name"]: port["containerPort"] for port in workload.container["ports"]}
    grace_s = workload.spec["terminationGracePeriodSeconds"]
    sleep_s = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    if is_gateway:
        section = config.gateway
        served = "grpc" if workload.name.endswith("picker") else "http"
        assert ports == {served: section.port, "management": section.management_port}
        assert section.host == section.management_host == "0.0.0.0"
        assert bool(section.client_keys_file) is not section.insecure
        assert ("/etc/baton/clients" in files) is bool(section.client_keys_file)
        assert ("/etc/baton/tls" in files) is bool(section.tls_certificate)
        assert ("/etc/baton/management" in files) is bool(section.management_key_file)
        assert bool(section.management_key_file) is (name == "vllm-many")
        assert grace_s > sleep_s + section.drain_timeout_s
        monkeypatch.setattr(access, "ACCOUNT", service_account(workload, tmp_path))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        options = gateway_options(config, 1)
        assert options.credentials.own
    else:
        worker = config.worker
        assert ports == {
            "http": worker.port,
            "handoff": worker.handoff_port,
            "probe": worker.probe_port,
        }
        assert worker.host == worker.handoff_host == "10.1.2.3"
        assert worker.name == "baton-decode-0"
        assert worker.role == workload.labels["baton/role"]
        assert grace_s > sleep_s + worker.drain_timeout_s
        check_engine(config)
        assert worker_options(config, 1).at.split("/")[2] == "node-7"
    for mounted in files:
        assert any(
            value.startswith(mounted)
            for value in (variable.get("value", "") for variable in workload.container["env"])
        ), f"nothing reads {mounted}"


def service_account(workload: Workload, tmp_path: Path) -> Path:
    """What Kubernetes mounts into the pod."""
    directory = tmp_path / "account"
    if workload.spec["automountServiceAccountToken"]:
        directory.mkdir()
        (directory / "namespace").write_text("baton", encoding="ascii")
    return directory


def check_engine(config: Config) -> None:
    """The engine's own options, as far as they can be read without a GPU."""
    if config.worker.engine != "vllm":
        return
    options = msgspec.convert(engine_options("vllm", config.engine), VllmOptions)
    launch = LaunchParameters(Path("/m"), "m", 8101, Path("/run"), "accelerator")
    assert "--kv-transfer-config" in server_arguments(options, config, launch)


def gateway_paths() -> set[str]:
    return set(json.loads(describe(is_managed_here=True))["paths"])


def probe_status(path: str) -> int:
    """What a worker's probe port answers."""

    async def is_ready() -> bool:
        return True

    async def ask() -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path}
        await ProbeApp(is_ready)(scope, None, send)
        return sent[0]["status"]

    return asyncio.run(ask())


@pytest.mark.parametrize(("name", "workload"), BATON_PODS)
def test_probes_ask_for_what_is_there(name: str, workload: Workload):
    container = workload.container
    ports = {port["name"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[kind]["httpGet"]
        assert get["port"] in ports - {"http"}
        assert get.get("scheme", "HTTP") == "HTTP"
        if workload.owner["kind"] == "Deployment":
            assert get["path"] in gateway_paths()
        else:
            assert probe_status(get["path"]) == 200
    assert probe_status("/health") == 404


@pytest.mark.parametrize(("name", "workload"), BATON_PODS)
def test_liveness_waits_longer_than_anything_else(name: str, workload: Workload):
    def lasts_s(kind: str) -> int:
        probe = workload.container[kind]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert lasts_s("livenessProbe") >= 60
    assert lasts_s("livenessProbe") > lasts_s("readinessProbe")
    values = yaml.safe_load((CHART / "values" / f"{name}.yaml").read_text(encoding="utf-8"))
    if workload.owner["kind"] == "StatefulSet":
        default_s = 1800
        startup_s = values.get("poolDefaults", {}).get("startupSeconds", default_s)
        assert lasts_s("startupProbe") >= startup_s


@pytest.mark.parametrize("name", PODS)
def test_selectors_take_the_pods_that_they_should(name: str):
    objects = OBJECTS[name]
    pods = [workload.labels for workload in workloads(objects)]
    for service in find(objects, "Service"):
        assert any(is_selected(service["spec"]["selector"], labels) for labels in pods)
        ports = {
            port["name"]
            for workload in workloads(objects)
            if is_selected(service["spec"]["selector"], workload.labels)
            for port in workload.container["ports"]
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for workload in workloads(objects):
        selector = workload.owner["spec"]["selector"]["matchLabels"]
        taken = [labels for labels in pods if is_selected(selector, labels)]
        assert taken == [workload.labels], f"{workload.name} takes other pods"
        budgets = [
            budget
            for budget in find(objects, "PodDisruptionBudget")
            if is_selected(budget["spec"]["selector"]["matchLabels"], workload.labels)
        ]
        assert len(budgets) == (0 if is_autoscale(workload) else 1)
        policies = [
            policy
            for policy in find(objects, "NetworkPolicy")
            if is_selected(policy["spec"]["podSelector"]["matchLabels"], workload.labels)
        ]
        assert len(policies) == 1


@pytest.mark.parametrize("name", PODS)
def test_a_gateway_watches_every_pools_service_and_may(name: str):
    objects = OBJECTS[name]
    gateways = [
        found
        for found in workloads(objects)
        if found.owner["kind"] == "Deployment" and not is_autoscale(found)
    ]
    assert len(gateways) == (2 if name == "picker" else 1)
    gateway, (members, *others) = (
        gateways[0],
        [
            found["value"]
            for each in gateways
            for found in each.container["env"]
            if found["name"] == "BATON_GATEWAY__MEMBERS"
        ],
    )
    assert set(others) <= {members}
    watched = {}
    for text in members.split(","):
        target = ServiceTarget.parse(text.removeprefix("kubernetes:"))
        (service,) = find(objects, "Service", target.service)
        assert service["spec"]["clusterIP"] == "None"
        ports = {port["name"]: port for port in service["spec"]["ports"]}
        assert ports[target.port]["appProtocol"] == "https"
        watched[target.service] = target.role
    for stateful_set in find(objects, "StatefulSet"):
        role = stateful_set["spec"]["template"]["metadata"]["labels"]["baton/role"]
        assert watched[stateful_set["spec"]["serviceName"]] == role
    (role,) = find(objects, "Role", "baton-gateway")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (binding,) = find(objects, "RoleBinding", "baton-gateway")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == gateway.spec["serviceAccountName"]
    assert find(objects, "ServiceAccount", gateway.spec["serviceAccountName"])
    assert not find(objects, "ClusterRole")


@pytest.mark.parametrize("name", PODS)
def test_workers_are_reached_by_gateways_and_workers_alone(name: str):
    (policy,) = find(OBJECTS[name], "NetworkPolicy", "baton-workers")
    first, *others = policy["spec"]["ingress"]
    (peer,) = first["from"]
    asking = ["gateway", "worker", *(["picker"] if name == "picker" else [])]
    assert peer["podSelector"]["matchExpressions"] == [
        {"key": "app.kubernetes.io/component", "operator": "In", "values": asking}
    ]
    for rule in others:  # scrapers, which show a certificate
        assert rule["from"]
        assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    (policy,) = find(OBJECTS[name], "NetworkPolicy", "baton-gateway")
    for rule in policy["spec"]["ingress"]:
        if {"port": "management", "protocol": "TCP"} in rule["ports"]:
            assert rule["from"], "everybody reaches the management port"


def test_autoscale_reads_every_gateway_and_scales_within_what_is_mounted(
    container_files: Path, monkeypatch: pytest.MonkeyPatch
):
    assert not any(is_autoscale(found) for found in workloads(OBJECTS["small"]))
    objects = OBJECTS["vllm-many"]
    (workload,) = (found for found in workloads(objects) if is_autoscale(found))
    config = settings_of(objects, workload, container_files, monkeypatch)
    program, *arguments = workload.container["command"]
    _, bound, _ = build_app().parse_args(arguments)
    flags = bound.arguments["flags"]
    assert (program, flags.on, flags.fleet) == ("baton", "kubernetes", "baton")
    (url,) = config.scaling.gateways
    found = re.fullmatch(r"dns:http://(.+):(\d+)", url)
    assert found is not None
    (service,) = find(objects, "Service", found[1])
    assert service["spec"]["clusterIP"] == "None"  # DNS has the address of each gateway
    gateway = next(w for w in workloads(objects) if w.name == "Deployment/baton-gateway")
    assert is_selected(service["spec"]["selector"], gateway.labels)
    ports = {port["name"]: port["containerPort"] for port in gateway.container["ports"]}
    assert ports["management"] == int(found[2])
    (policy,) = find(objects, "NetworkPolicy", "baton-gateway")
    assert any(
        is_selected(peer.get("podSelector", {}).get("matchLabels", {"": ""}), workload.labels)
        for rule in policy["spec"]["ingress"]
        if {"port": "management", "protocol": "TCP"} in rule["ports"]
        for peer in rule["from"]
    )
    (binding,) = find(objects, "RoleBinding", "baton-autoscale")
    assert binding["roleRef"]["name"] == "baton-autoscale"
    assert binding["subjects"][0]["name"] == workload.spec["serviceAccountName"]
    for role, most in (
        ("prefill", config.scaling.max_prefill),
        ("decode", config.scaling.max_decode),
    ):
        mounted = 0
        for stateful_set in find(objects, "StatefulSet"):
            volumes = stateful_set["spec"]["template"]["spec"]["volumes"]
            if stateful_set["spec"]["template"]["metadata"]["labels"]["baton/role"] == role:
                (identity,) = (each for each in volumes if each["name"] == "identity")
                mounted += sum(
                    item["path"].endswith("/tls.crt") for item in identity["secret"]["items"]
                )
        assert most <= mounted


def test_autoscale_and_monitors_read_gateways_and_pickers(
    container_files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    values = yaml.safe_load((CHART / "values" / "picker.yaml").read_text(encoding="utf-8"))
    values |= {"autoscale": {"enabled": True}, "monitoring": {"enabled": True}}
    values["gateway"]["config"] += "\n[gateway]\nprocesses = 2\n"
    path = tmp_path / "picker.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    objects = [each for each in yaml.safe_load_all(render_by_helm(path)["picker.yaml"]) if each]
    by_name = {each.name: each for each in workloads(objects)}
    autoscale = by_name["Deployment/baton-autoscale"]
    urls = settings_of(objects, autoscale, container_files, monkeypatch).scaling.gateways
    (monitor,) = find(objects, "ServiceMonitor")
    for url, name in zip(urls, ("baton-gateway", "baton-picker"), strict=True):
        pod = by_name[f"Deployment/{name}"]
        (service,) = find(objects, "Service", f"{name}-management")
        assert url == f"dns:http://{name}-management:9000"
        assert is_selected(service["spec"]["selector"], pod.labels)
        labels = service["metadata"]["labels"]
        assert is_selected(monitor["spec"]["selector"]["matchLabels"], labels)
        (policy,) = find(objects, "NetworkPolicy", name)
        assert any(
            is_selected(peer.get("podSelector", {}).get("matchLabels", {"": ""}), autoscale.labels)
            for rule in policy["spec"]["ingress"]
            if {"port": "management", "protocol": "TCP"} in rule["ports"]
            for peer in rule["from"]
        )
        config = settings_of(objects, pod, container_files, monkeypatch)
        assert config.gateway.processes == 1, "others would have ports that nobody knows"


def test_an_inference_pool_takes_the_workers_and_names_the_picker():
    objects = OBJECTS["picker"]
    (pool,) = find(objects, "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    taken = [
        w
        for w in workloads(objects)
        if is_selected(pool["spec"]["selector"]["matchLabels"], w.labels)
    ]
    assert [w.owner["kind"] for w in taken] == ["StatefulSet"]
    ports = {port["name"]: port["containerPort"] for port in taken[0].container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    reference = pool["spec"]["endpointPickerRef"]
    (service,) = find(objects, "Service", reference["name"])
    assert service["spec"]["ports"][0]["port"] == reference["port"]["number"]
    (policy,) = find(objects, "NetworkPolicy", "baton-picker")
    assert policy["spec"]["ingress"][0]["from"], "everybody reaches the picker"


def affinity_of(objects: list[Object], name: str) -> Object:
    (owner,) = find(objects, "StatefulSet", name)
    return dict(owner["spec"]["template"]["spec"].get("affinity", {}))


def terms_of(objects: list[Object], name: str) -> list[tuple[int, str]]:
    """Weights and topology keys of what a pool's pods prefer to be near."""
    near = affinity_of(objects, name)["podAffinity"]
    return [
        (each["weight"], each["podAffinityTerm"]["topologyKey"])
        for each in near["preferredDuringSchedulingIgnoredDuringExecution"]
    ]


def test_prefill_and_decode_prefer_to_be_near_each_other():
    objects = OBJECTS["small"]
    by_role = {each.labels.get("baton/role"): each for each in workloads(objects)}
    zone, host = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        name = by_role[role].owner["metadata"]["name"]
        assert terms_of(objects, name) == [(100, zone), (25, host)]
        near = affinity_of(objects, name)["podAffinity"]
        for term in near["preferredDuringSchedulingIgnoredDuringExecution"]:
            selector = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
            assert is_selected(selector, by_role[other].labels)
            assert not is_selected(selector, by_role[role].labels)


def test_how_near_and_how_spread_is_a_value(tmp_path: Path):
    base = yaml.safe_load((CHART / "values" / "small.yaml").read_text(encoding="utf-8"))
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]
    }}}  # fmt: skip
    cases = {
        "none": {"topology": {"near": "none"}},
        "required": {"topology": {"near": "required", "rackLabel": "example.com/rack"}},
        "spread": {"topology": {"spreadKey": "kubernetes.io/hostname"}},
        "own": {"pools": {"decode": {"affinity": own}}},
    }
    for name, changes in cases.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(merged(base, changes)), encoding="utf-8")
    rendered = render_by_helm(*(tmp_path / f"{name}.yaml" for name in cases))
    objects = {
        name: [each for each in yaml.safe_load_all(rendered[f"{name}.yaml"]) if each]
        for name in cases
    }
    for found in (each for case in objects.values() for each in find(case, "StatefulSet")):
        schemas.validate(found)
    prefill, decode = "baton-prefill", "baton-decode"
    assert affinity_of(objects["none"], prefill) == {}
    assert terms_of(objects["required"], prefill)[1] == (50, "example.com/rack")
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    (term,) = affinity_of(objects["required"], prefill)["podAffinity"][required]
    assert term["labelSelector"]["matchLabels"]["baton/role"] == "decode"
    assert required not in affinity_of(objects["required"], decode)["podAffinity"]
    (owner,) = find(objects["spread"], "StatefulSet", decode)
    (constraint,) = owner["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert is_selected(
        constraint["labelSelector"]["matchLabels"], owner["spec"]["template"]["metadata"]["labels"]
    )
    assert affinity_of(objects["own"], decode) == own
    assert "podAffinity" in affinity_of(objects["own"], prefill)


def test_racks_are_stateful_sets_whose_workers_know_theirs(container_files, monkeypatch):
    objects = OBJECTS["vllm-many"]
    sets = find(objects, "StatefulSet")
    assert {found["metadata"]["name"] for found in sets} == {
        "baton-prefill-r1",
        "baton-prefill-r2",
        "baton-decode-r1",
        "baton-decode-r2",
    }
    for workload in workloads(objects):
        if workload.owner["kind"] != "StatefulSet":
            continue
        rack = workload.spec["nodeSelector"]["example.com/rack"]
        assert rack == workload.labels["baton/rack"]
        assert workload.owner["metadata"]["name"].endswith(f"-{rack}")
        environment = environment_of(workload, container_files)
        assert environment["BATON_TOPOLOGY_RACK"] == rack
        limits = workload.container["resources"]["limits"]
        assert limits["rdma/hca_shared_devices_a"] == 1
        assert limits["hugepages-2Mi"] == "4Gi"
        assert limits["nvidia.com/gpu"] == (8 if "decode" in workload.name else 1)


def test_a_worker_sees_its_own_identity_alone():
    for workload in workloads(OBJECTS["vllm-many"]):
        if workload.owner["kind"] != "StatefulSet":
            continue
        (mount,) = (m for m in workload.container["volumeMounts"] if m["name"] == "identity")
        assert mount["subPathExpr"] == "$(BATON_WORKER__NAME)"
        (volume,) = (v for v in workload.spec["volumes"] if v["name"] == "identity")
        paths = {item["path"] for item in volume["secret"]["items"]}
        for number in range(workload.owner["spec"]["replicas"]):
            pod = f"{workload.owner['metadata']['name']}-{number}"
            assert {f"{pod}/{name}" for name in ("tls.crt", "tls.key", "ca.crt", "ca.crl")} <= paths


def test_monitors_read_metrics_where_they_are():
    objects = OBJECTS["vllm-many"]
    monitors = find(objects, "ServiceMonitor")
    assert len(monitors) == 2
    for monitor in monitors:
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        selector = monitor["spec"]["selector"]["matchLabels"]
        services = [
            service
            for service in find(objects, "Service")
            if is_selected(selector, service["metadata"]["labels"])
        ]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["path"] in gateway_paths()
        assert services
        for service in services:
            ports = {port["name"]: port for port in service["spec"]["ports"]}
            assert ports[endpoint["port"]]["appProtocol"] == endpoint["scheme"]
            assert service["spec"]["clusterIP"] == "None", "clients' Service is scraped"
        assert ("tlsConfig" in endpoint) is (endpoint["scheme"] == "https")
        if "tlsConfig" in endpoint:
            assert endpoint["tlsConfig"]["serverName"] == "worker.baton.internal"
            assert endpoint["tlsConfig"].keys() == {"serverName", "ca", "cert", "keySecret"}


def test_rules_and_the_board_are_in_the_cluster_where_they_are_wanted():
    """Also fails if the manifests were not rendered after rules or board had changed."""
    objects, render = OBJECTS["vllm-many"], "run: python scripts/render_chart.py"
    (rule,) = find(objects, "PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    rules = (ROOT / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8")
    assert rule["spec"] == yaml.safe_load(rules), render
    (board,) = find(objects, "ConfigMap", "baton-grafana")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    kept = (ROOT / "deploy/grafana/baton.json").read_text(encoding="utf-8")
    assert json.loads(board["data"]["baton.json"]) == json.loads(kept), render
    assert not find(OBJECTS["small"], "PrometheusRule")
    assert not find(OBJECTS["small"], "ConfigMap", "baton-grafana")


def test_rules_lead_to_where_the_documentation_is_served(tmp_path: Path):
    values = yaml.safe_load((CHART / "values" / "small.yaml").read_text(encoding="utf-8"))
    url = "https://docs.example.com/alerts.html"
    monitoring = {"rules": True, "runbookUrl": url, "labels": {"release": "prometheus"}}
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(merged(values, {"monitoring": monitoring})), encoding="utf-8")
    objects = [each for each in yaml.safe_load_all(render_by_helm(path)["rules.yaml"]) if each]
    (rule,) = find(objects, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert not find(objects, "ServiceMonitor"), "monitoring.enabled is for these"
    (group,) = rule["spec"]["groups"]
    for each in group["rules"]:
        assert each["annotations"]["runbook_url"] == f"{url}#{each['alert'].lower()}"


def test_autoscale_shows_the_management_key_that_gateways_want():
    (workload,) = (found for found in workloads(OBJECTS["vllm-many"]) if is_autoscale(found))
    by_name = {each["name"]: each for each in workload.container["env"]}
    key = {"secretKeyRef": {"name": "baton-management-key", "key": "key"}}
    assert by_name[MANAGEMENT_KEY_VARIABLE]["valueFrom"] == key


def test_a_ray_cluster_has_a_group_for_each_rack_and_tokens():
    (cluster,) = find(OBJECTS["ray"], "RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token", "secretName": "baton-ray-token"}
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert groups.keys() == {"gpu-r1", "gpu-r2"}
    for group in groups.values():
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] == 2
        assert group["labels"]["rack"] == group["groupName"].removeprefix("gpu-")
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert not find(OBJECTS["ray"], "Deployment")


def test_baton_up_on_the_head_starts_what_the_values_say(container_files: Path, monkeypatch):
    objects = OBJECTS["ray"]
    head, *hosts = workloads(objects)
    prepare(objects, head, container_files, monkeypatch)
    (command,) = re.findall(r"-- baton (up .+)", (CHART / "templates/NOTES.txt").read_text())
    _, bound, _ = build_app().parse_args(command)
    plan = plan_fleet(
        bound.arguments["flags"].resolve(), "default", "0.1.0", "cost", has_key_file=True
    )
    assert plan.settings["worker.model"] == "/models/my-model"
    assert plan.settings["worker.engine"] == "vllm"
    assert plan.settings["cluster.key_file"] == str(container_files / "cluster/key")
    workers = plan.group_of("both")
    assert workers is not None
    assert workers.selector == {"pool": "gpu"}
    groups = head.owner["spec"]["workerGroupSpecs"]
    num_gpus = [each.container["resources"]["limits"]["nvidia.com/gpu"] for each in hosts]
    assert workers.num_processes * workers.gpus == sum(
        group["replicas"] * num for group, num in zip(groups, num_gpus, strict=True)
    )
    for host in hosts:  # Baton copies no files
        secrets = {path for path, volume in host.mounted() if "secret" in volume}
        assert secrets == {"/etc/baton/cluster"}
        assert "/models" in {path for path, _ in host.mounted()}


@pytest.mark.parametrize("name", NAMES)
def test_the_image_of_an_example_can_be_built(name: str):
    stages = re.split(r"^FROM .+ AS (\w+)$", CONTAINERFILE.read_text("utf-8"), flags=re.MULTILINE)
    steps = dict(zip(stages[1::2], stages[2::2], strict=True))
    for workload in workloads(OBJECTS[name]):
        target = workload.container["image"].partition("/baton-")[2].partition(":")[0]
        assert target in steps
        if name == "ray":  # of which KubeRay's probes need the extra `default`, and wget
            assert {"baton-kv[ray]", "ray[default]", "wget"} <= {
                *re.findall(r"[\w[\]-]+", steps[target])
            }


REFUSED: list[tuple[Object, str]] = [
    ({"pools": {"p": {"role": "prefill"}}}, "no pool decodes"),
    ({"image": {"repository": ""}}, "image.repository"),
    ({"gateway": {"insecure": False}}, "clientKeysSecret"),
    ({"clusterKeySecret": ""}, "clusterKeySecret is empty"),
    ({"pools": {"decode": {"racks": ["r1"]}}}, "topology.rackLabel"),
    ({"pools": {"gateway": {"role": "decode"}}}, "cannot be called gateway"),
    ({"pools": {"picker": {"role": "decode"}}}, "cannot be called picker"),
    (
        {
            "topology": {"rackLabel": "rack"},
            "pools": {"a": {"role": "both", "racks": ["b"]}, "a-b": {"role": "both"}},
        },
        "a and a-b would both have a StatefulSet",
    ),
    ({"picker": {"enabled": True}}, "picker.proxies"),
    ({"pools": {"decode": {"replica": 2}}}, "replica"),
    ({"gateway": {"drainSeconds": "soon"}}, "drainSeconds"),
    ({"netpol": {}}, "netpol"),
    ({"security": {"tls": "on"}}, "tls"),
    ({"monitoring": {"runbookUrl": "docs/alerts.md"}}, "runbookUrl"),
]


def test_values_that_cannot_be_are_refused(tmp_path: Path):
    small = yaml.safe_load((CHART / "values" / "small.yaml").read_text(encoding="utf-8"))
    for number, (changes, _) in enumerate(REFUSED):
        given = copy.deepcopy(small)
        if "pools" in changes and "decode" not in changes["pools"]:
            given["pools"] = {}
        text = yaml.safe_dump(merged(given, changes))
        (tmp_path / f"{number}.yaml").write_text(text, encoding="utf-8")
    answers = render_by_helm(*tmp_path.glob("*.yaml"))
    for number, (changes, said) in enumerate(REFUSED):
        answer = answers[f"{number}.yaml"]
        assert answer.startswith("refused: "), changes
        assert said in answer, (changes, answer)


def merged(values: Object, changes: Object) -> Object:
    """As Helm merges values."""
    result = dict(values)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


def test_what_a_pool_changes_wins_over_the_defaults(tmp_path: Path):
    values = yaml.safe_load((CHART / "values" / "small.yaml").read_text(encoding="utf-8"))
    override = {"runAsUser": 0, "runAsNonRoot": False, "capabilities": {"add": ["IPC_LOCK"]}}
    values["poolDefaults"] = {"containerSecurityContext": override, "gpus": 1}
    values["pools"]["decode"] |= {"gpus": 0, "replicas": 3}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    text = render_by_helm(tmp_path / "values.yaml")["values.yaml"]
    objects = [found for found in yaml.safe_load_all(text) if found]
    for workload in workloads(objects):
        own = workload.container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        if workload.owner["kind"] != "StatefulSet":
            assert "runAsUser" not in own
            continue
        assert own["runAsNonRoot"] is False
        assert own["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        is_decode = workload.labels["baton/role"] == "decode"
        assert workload.owner["spec"]["replicas"] == (3 if is_decode else 1)
        assert ("nvidia.com/gpu" in workload.container["resources"]["limits"]) is not is_decode
