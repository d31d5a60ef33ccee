"""Pods, StatefulSets and Deployments, as far as a fleet's control reads them. No I/O."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.net.kubernetes.objects import Name

NAME_LABEL: Final = "app.kubernetes.io/name"
RELEASE_LABEL: Final = "app.kubernetes.io/instance"
VERSION_LABEL: Final = "app.kubernetes.io/version"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
ROLE_LABEL: Final = "baton/role"
CHART: Final = "baton"
WorkloadKind: TypeAlias = Literal["StatefulSet", "Deployment"]

Labels: TypeAlias = dict[str, str]
Count: TypeAlias = Annotated[int, Meta(ge=0)]


class Metadata(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Of one object. With `deletion_timestamp` it is being deleted."""

    name: Name
    uid: Name = ""
    resource_version: Name = ""
    generation: int = 0
    labels: Labels = {}
    deletion_timestamp: str | None = None


class Variable(msgspec.Struct, frozen=True):
    """Of a container's environment; empty: its value is from elsewhere."""

    name: str
    value: str = ""


class ContainerPort(msgspec.Struct, frozen=True, rename="camel"):
    """A port that has a name."""

    container_port: int
    name: str = ""


class Probe(msgspec.Struct, frozen=True, rename="camel"):
    """How often it is asked, and how many failures are one too many."""

    period_seconds: int = 10
    failure_threshold: int = 3


class Container(msgspec.Struct, frozen=True, rename="camel"):
    """As the pod asks for it."""

    name: Name
    env: tuple[Variable, ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    startup_probe: Probe | None = None


class SecretItem(msgspec.Struct, frozen=True):
    """A file that is made of an entry of a Secret."""

    path: str


class SecretSource(msgspec.Struct, frozen=True):
    """A volume with files of a Secret; no items: all of its entries."""

    items: tuple[SecretItem, ...] = ()


class Volume(msgspec.Struct, frozen=True):
    """A volume of any kind."""

    name: Name
    secret: SecretSource | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What is asked for."""

    containers: tuple[Container, ...]
    node_name: str = ""
    termination_grace_period_seconds: int = 30
    volumes: tuple[Volume, ...] = ()


class Condition(msgspec.Struct, frozen=True):
    """Whether something is true of an object, and why not."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class Waiting(msgspec.Struct, frozen=True):
    """A container that does not run yet, or is to run again."""

    reason: str = ""
    message: str = ""


class Running(msgspec.Struct, frozen=True, rename="camel"):
    """A container that runs."""

    started_at: dt.datetime | None = None


class Terminated(msgspec.Struct, frozen=True, rename="camel"):
    """A container that has ended."""

    exit_code: int
    reason: str = ""


class ContainerState(msgspec.Struct, frozen=True):
    """One of these."""

    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What the kubelet reports. `started`: its startup probe has succeeded."""

    ready: bool = False
    started: bool | None = None
    restart_count: Count = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What is reported of a pod."""

    phase: str = "Pending"
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    spec: PodSpec
    status: PodStatus = PodStatus()

    @property
    def name(self) -> str:
        """Its name."""
        return self.metadata.name

    @property
    def component(self) -> str:
        """Which part of the chart it is of: worker, gateway, picker, autoscale."""
        return self.metadata.labels.get(COMPONENT_LABEL, "")


class TemplateMetadata(msgspec.Struct, frozen=True):
    """Of pods that are to be made."""

    labels: Labels = {}


class PodTemplate(msgspec.Struct, frozen=True):
    """What pods are made of."""

    metadata: TemplateMetadata
    spec: PodSpec


class WorkloadSpec(msgspec.Struct, frozen=True, rename="camel"):
    """How many pods of which kind."""

    template: PodTemplate
    replicas: Count = 1


class WorkloadStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How far the controller is."""

    observed_generation: int = 0
    replicas: Count = 0
    ready_replicas: Count = 0
    available_replicas: Count = 0
    updated_replicas: Count = 0
    current_revision: str = ""
    update_revision: str = ""
    conditions: tuple[Condition, ...] = ()


class Workload(msgspec.Struct, frozen=True):
    """A StatefulSet or a Deployment: `kind` is None in lists, where the API leaves it out."""

    metadata: Metadata
    spec: WorkloadSpec
    status: WorkloadStatus = WorkloadStatus()
    kind: WorkloadKind | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.metadata.name

    @property
    def release(self) -> str:
        """The release that it is of."""
        return self.metadata.labels.get(RELEASE_LABEL, "")

    @property
    def component(self) -> str:
        """Which part of the chart its pods are."""
        return self.spec.template.metadata.labels.get(COMPONENT_LABEL, "")

    @property
    def role(self) -> str:
        """Of workers: their role; else empty."""
        return self.spec.template.metadata.labels.get(ROLE_LABEL, "")

    @property
    def startup_s(self) -> int:
        """For how long the startup probes let its containers load."""
        probes = (each.startup_probe for each in self.spec.template.spec.containers)
        return max((p.period_seconds * p.failure_threshold for p in probes if p), default=0)

    @property
    def grace_s(self) -> int:
        """For how long a pod may terminate."""
        return self.spec.template.spec.termination_grace_period_seconds

    @property
    def num_replaced(self) -> int:
        """How many pods have the present template."""
        status = self.status
        if status.observed_generation < self.metadata.generation:
            return 0
        if self.kind == "StatefulSet" and status.update_revision == status.current_revision:
            return status.replicas
        return status.updated_replicas

    @property
    def is_rolling_out(self) -> bool:
        """Whether some pods have, or had until just now, another template than the present one."""
        status = self.status
        if status.observed_generation < self.metadata.generation:
            return True
        if self.kind == "StatefulSet":
            return status.update_revision != status.current_revision
        return status.updated_replicas < max(self.spec.replicas, status.replicas)

    @property
    def is_rolled_out(self) -> bool:
        """Whether all pods have the present template, are available, and no others are left."""
        status, wanted = self.status, self.spec.replicas
        if status.observed_generation < self.metadata.generation:
            return False
        if self.kind == "StatefulSet" and status.update_revision != status.current_revision:
            return False
        if self.kind == "Deployment" and status.updated_replicas != wanted:
            return False
        return status.replicas == status.available_replicas == wanted
