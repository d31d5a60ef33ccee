"""Kubernetes objects of a rendered chart, and what of Baton is in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Object: TypeAlias = dict[str, Any]

POD_FIELDS = {
    "metadata.name": "baton-decode-0",
    "status.podIP": "10.1.2.3",
    "spec.nodeName": "node-7",
}
"""Of the pod whose variables `environment_of` makes."""


def find(objects: list[Object], kind: str, name: str | None = None) -> list[Object]:
    """All of a kind, perhaps of one name."""
    return [
        found
        for found in objects
        if found["kind"] == kind and name in {None, found["metadata"]["name"]}
    ]


@dataclass(frozen=True)
class Workload:
    """A pod template, and the object that it is in."""

    owner: Object
    template: Object

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def spec(self) -> Object:
        return self.template["spec"]

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return container

    def mounted(self) -> Iterator[tuple[str, Object]]:
        """Each mount's path, and its volume."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        assert len(volumes) == len(self.spec["volumes"])
        used = set()
        for mount in self.container["volumeMounts"]:
            used.add(mount["name"])
            yield mount["mountPath"], volumes[mount["name"]]
        assert used == volumes.keys(), f"{self.name} mounts not all of its volumes"


def workloads(objects: list[Object]) -> Iterator[Workload]:
    """Every pod template."""
    for owner in objects:
        match owner["kind"]:
            case "Deployment" | "StatefulSet":
                yield Workload(owner, owner["spec"]["template"])
            case "RayCluster":
                groups = [owner["spec"]["headGroupSpec"], *owner["spec"]["workerGroupSpecs"]]
                for group in groups:
                    yield Workload(owner, group["template"])


def environment_of(workload: Workload, root: Path) -> dict[str, str]:
    """The variables that a pod of it gets; `root` stands for the container's /etc/baton."""
    labels = workload.labels
    environment = {}
    for variable in workload.container["env"]:
        name = variable["name"]
        assert name not in environment, f"{name} is set twice"
        if "valueFrom" in variable:
            if "secretKeyRef" in (source := variable["valueFrom"]):
                environment[name] = f"of the Secret {source['secretKeyRef']['name']}"
                continue
            path = source["fieldRef"]["fieldPath"]
            if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
                environment[name] = labels.get(label[1], "")
            else:
                environment[name] = POD_FIELDS[path]
        else:
            environment[name] = variable["value"].replace("/etc/baton", str(root))
    return environment


def is_selected(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a selector of labels takes an object with these labels."""
    return selector.items() <= labels.items()
