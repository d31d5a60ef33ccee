"""What an operator may ask of a release on Kubernetes: the same as of fleets elsewhere."""

from __future__ import annotations

import asyncio
import datetime as dt
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, cast

from baton.clock import MachineClock
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetMember, FleetSize, FleetStatus, MemberRole
from baton.launch.kubernetes.api import FleetApi, KubernetesFleetError
from baton.launch.kubernetes.members import ENDED, ROLES, describe_pod, find_role, missing_member
from baton.launch.kubernetes.objects import VERSION_LABEL, Pod, Workload
from baton.launch.kubernetes.sizes import divide, find_without_identity, pod_names
from baton.launch.kubernetes.waiting import (
    AWAY_S,
    END_MARGIN_S,
    LOOK_INTERVAL_S,
    START_MARGIN_S,
    ReleaseWatch,
)
from baton.launch.operations import NOUNS, decide_size

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from baton.config.sections import Role

CONFLICTS: Final = 10
"""How often a change is tried again because the object's status has changed since it was read."""
CONFLICT_WAIT_S: Final = 0.1
EVICT_TIMEOUT_S: Final = 300.0
EVICT_AGAIN_S: Final = 5.0
DECODERS: Final = frozenset[MemberRole]({"decode", "both"})
DOWN_ORDER: Final = ("autoscale", "gateway", "picker", "worker")
"""Components: what would start workers again ends first, then what takes requests."""


class KubernetesFleet:
    """See `FleetControl`. Owned by one event loop. `named`: the operator named the release."""

    def __init__(self, api: FleetApi, release: str, *, named: bool) -> None:
        self._api, self._release, self._named = api, release, named
        self._watch = ReleaseWatch(api, release)
        self._clock = MachineClock()

    async def status(self) -> FleetStatus:
        """See `FleetControl`."""
        sets, pods = await asyncio.gather(
            self._api.list_workloads("StatefulSet", self._release), self._list_pods()
        )
        members = self._describe(pods)
        present = {member.name for member in members}
        members += [
            missing_member(name, workload.role)
            for workload in sets
            if workload.role in ROLES
            for name in pod_names(workload, 0, workload.spec.replicas)
            if name not in present
        ]
        versions = {each.metadata.labels.get(VERSION_LABEL, "") for each in (pods or sets)}
        return FleetStatus(
            fleet=f"{self._api.namespace}/{self._release}",
            backend="kubernetes",
            version=", ".join(sorted(versions - {""})) or "unknown",
            members=tuple(sorted(members, key=lambda each: (each.role != "gateway", each.name))),
        )

    async def scale(self, size: FleetSize) -> AsyncIterator[str]:
        """See `FleetControl`. Workers of one role are divided evenly between its StatefulSets."""
        by_role = await self._workers_by_role()
        counts = {role: _count(sets) for role, sets in by_role.items()}
        decided = decide_size(counts, size)
        changes: list[tuple[Workload, int]] = []
        for role, total in decided.items():
            sizes = divide({each.name: each.spec.replicas for each in by_role[role]}, total)
            changes += [
                (each, sizes[each.name])
                for each in by_role[role]
                if sizes[each.name] != each.spec.replicas
            ]
        growing = [(each, num) for each, num in changes if num > each.spec.replicas]
        for workload, num in growing:
            _require_identities(workload, num)
        async for line in self._grow(growing):
            yield line
        async for line in self._shrink([each for each in changes if each not in growing]):
            yield line
        yield f"serving: {', '.join(f'{num} {NOUNS[role]}' for role, num in decided.items())}"

    async def drain(self, worker: str) -> AsyncIterator[str]:
        """See `FleetControl`: its pod is evicted, and its StatefulSet makes another one."""
        pods = await self._list_pods()
        pod = next((each for each in pods if each.name == worker), None)
        role = None if pod is None else find_role(pod)
        if pod is None or role is None:
            raise FleetError(f"there is no worker {worker!r}; there are {_names(pods)}")
        alike = DECODERS if role in DECODERS else {role}
        others = [
            each.name
            for each in self._describe(pods)
            if each.name != worker and each.role in alike and each.state == "ready"
        ]
        if not others and role != "prefill":  # decode workers compute prompts, too
            kind = "gateway" if role == "gateway" else "worker that generates answers and is ready"
            raise FleetError(
                f"{worker} is the last {kind}: start another one first, with `baton scale`"
            )
        async for line in self._evict(pod):
            yield line
        yield f"{worker}: draining"
        grace_s = pod.spec.termination_grace_period_seconds
        async for line in self._watch.until_gone([pod], grace_s + END_MARGIN_S):
            yield line
        yield (
            "Kubernetes keeps the number of workers: another pod starts in its place, on another "
            "node if this one is cordoned. `baton scale` has fewer"
        )

    async def upgrade(self) -> AsyncIterator[str]:
        """See `FleetControl`. A rollout that is under way is followed; else all pods are replaced.

        Which image is Helm's matter: Kubernetes rolls out at once what `helm upgrade` changes.
        """
        sets = await self._api.list_workloads("StatefulSet", self._release)
        deployments = await self._api.list_workloads("Deployment", self._release)
        gateways_last = sorted(deployments, key=lambda each: each.component == "gateway")
        wanted = [each for each in (*sets, *gateways_last) if each.spec.replicas]
        under_way = [each for each in wanted if each.is_rolling_out]
        if under_way:
            yield f"a rollout of {', '.join(each.name for each in under_way)} is under way"
            for workload in under_way:
                async for line in self._watch.until_rolled_out(workload):
                    yield line
            return
        await self._require_another_decoder()
        at = dt.datetime.fromtimestamp(self._clock.unix_now(), dt.UTC).isoformat(timespec="seconds")
        for workload in wanted:
            await self._api.restart(workload, at)
            async for line in self._watch.until_rolled_out(workload):
                yield line
        yield "every process was replaced, and has the present configuration"

    async def down(self) -> AsyncIterator[str]:
        """See `FleetControl`: every workload is scaled to nothing; the release itself stays."""
        if not self._named:
            raise FleetError(
                "name what is to end: `baton down --on kubernetes --fleet "
                f"{self._api.namespace}/{self._release}`"
            )
        sets = await self._api.list_workloads("StatefulSet", self._release)
        deployments = await self._api.list_workloads("Deployment", self._release)
        for component in DOWN_ORDER:
            ending = [each for each in (*deployments, *sets) if each.component == component]
            pods = [each for each in await self._list_pods() if each.component == component]
            for workload in ending:
                await self._set_replicas(workload, 0)
            for pod in pods:
                yield f"{pod.name}: draining"
            grace_s = max((each.grace_s for each in ending), default=0)
            if pods:
                async for line in self._watch.until_gone(pods, grace_s + END_MARGIN_S):
                    yield line
        yield (
            f"all processes have ended. `helm -n {self._api.namespace} uninstall {self._release}` "
            "removes the release; `helm upgrade` starts it again"
        )

    async def logs(self, member: str, num_lines: int, *, follow: bool) -> AsyncIterator[str]:
        """See `FleetControl`. With `follow`, those of the pod's next containers, too."""
        pods = await self._list_pods()
        pod = next((each for each in pods if each.name == member), None)
        if pod is None:
            raise FleetError(f"there is no process {member!r}; there are {_names(pods)}")
        since: str | None = None
        seen_at = self._clock.now()
        while True:
            try:
                resumed, tail = since, num_lines if since is None else None
                async for raw in self._api.read_log(pod, tail, since, follow=follow):
                    seen_at = self._clock.now()
                    time, _, line = raw.decode(errors="replace").partition(" ")
                    if resumed is None or time > resumed:  # RFC 3339, of one length
                        since = time
                        yield line
            except KubernetesFleetError as exc:
                # 400: the next container does not run yet.
                is_temporary = exc.is_temporary or exc.status == HTTPStatus.BAD_REQUEST
                if not (follow and is_temporary) or self._clock.now() - seen_at > AWAY_S:
                    raise
            else:  # it answers, though the pod may write nothing
                seen_at = self._clock.now()
            if not follow:
                return
            await asyncio.sleep(LOOK_INTERVAL_S)

    # Within

    async def _list_pods(self) -> tuple[Pod, ...]:
        """Without those that have ended, which Kubernetes keeps for a while to be read."""
        pods = await self._api.list_pods(self._release)
        return tuple(pod for pod in pods if pod.status.phase not in ENDED)

    def _describe(self, pods: Sequence[Pod]) -> list[FleetMember]:
        now_s = self._clock.unix_now()
        roles = ((pod, find_role(pod)) for pod in pods)
        return [describe_pod(pod, role, now_s) for pod, role in roles if role is not None]

    async def _workers_by_role(self) -> Mapping[Role, list[Workload]]:
        found: dict[Role, list[Workload]] = {}
        for each in await self._api.list_workloads("StatefulSet", self._release):
            if each.role in ROLES:
                found.setdefault(cast("Role", each.role), []).append(each)
        return found

    def _find_ready_decoders(self, pods: Sequence[Pod]) -> set[str]:
        members = self._describe(pods)
        return {each.name for each in members if each.role in DECODERS and each.state == "ready"}

    async def _require_another_decoder(self) -> None:
        ready = self._find_ready_decoders(await self._list_pods())
        if len(ready) == 1:
            raise FleetError(
                f"there is one worker that generates answers and is ready, {ready.pop()}, and a "
                "StatefulSet ends it before its successor starts: `baton scale` has a second one, "
                "so that no request fails; `baton status` shows why others are not ready"
            )

    def _require_decoder_left(
        self, pods: Sequence[Pod], shrinking: Sequence[tuple[Workload, int]]
    ) -> None:
        """Pass, or raise: a StatefulSet ends its newest pods, also where only these serve."""
        leaving = {
            name
            for workload, num in shrinking
            for name in pod_names(workload, num, workload.spec.replicas)
        }
        ready = self._find_ready_decoders(pods)
        if ready and ready <= leaving:
            raise FleetError(
                f"{', '.join(sorted(ready))} would go, as a StatefulSet ends its newest pods, and "
                "no other worker that generates answers is ready: `baton status` shows why"
            )

    async def _grow(self, growing: Sequence[tuple[Workload, int]]) -> AsyncIterator[str]:
        added: list[str] = []
        for workload, num in growing:
            await self._set_replicas(workload, num)
            names = pod_names(workload, workload.spec.replicas, num)
            yield f"{', '.join(names)}: starting"
            added += names
        if added:
            startup_s = max(workload.startup_s for workload, _ in growing)
            async for line in self._watch.until_ready(added, startup_s + START_MARGIN_S):
                yield line

    async def _shrink(self, shrinking: Sequence[tuple[Workload, int]]) -> AsyncIterator[str]:
        if not shrinking:
            return
        present = await self._list_pods()
        self._require_decoder_left(present, shrinking)
        pods, leaving = {pod.name: pod for pod in present}, list[Pod]()
        for workload, num in shrinking:
            await self._set_replicas(workload, num)
            names = pod_names(workload, num, workload.spec.replicas)
            yield f"{', '.join(names)}: draining"
            leaving += [pods[name] for name in names if name in pods]
        if leaving:
            grace_s = max(workload.grace_s for workload, _ in shrinking)
            async for line in self._watch.until_gone(leaving, grace_s + END_MARGIN_S):
                yield line

    async def _set_replicas(self, workload: Workload, num: int) -> None:
        """Change a size, unless another process has changed it since it was read."""
        before, kind = workload.spec.replicas, workload.kind or "StatefulSet"
        for _ in range(CONFLICTS):
            if workload.spec.replicas == num:
                return
            if workload.spec.replicas != before:
                raise FleetError(
                    f"{workload.name} was changed from {before} to {workload.spec.replicas} "
                    "replicas meanwhile, by another command, `baton autoscale` or Helm: it was "
                    "left so. Run the command again"
                )
            try:
                await self._api.set_replicas(workload, num)
            except KubernetesFleetError as exc:
                if exc.status != HTTPStatus.CONFLICT:
                    raise
            else:
                return
            await asyncio.sleep(CONFLICT_WAIT_S)
            found = await self._api.list_workloads(kind, self._release)
            workload = _find(found, workload.name)
        raise FleetError(f"{workload.name} changes all the time: it was not scaled. Try again")

    async def _evict(self, pod: Pod) -> AsyncIterator[str]:
        """Evict a pod as soon as the PodDisruptionBudget allows it."""
        give_up_at, shown = self._clock.now() + EVICT_TIMEOUT_S, ""
        while True:
            try:
                await self._api.evict(pod)
            except KubernetesFleetError as exc:
                if exc.status in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                    return  # it is gone
                if exc.status != HTTPStatus.TOO_MANY_REQUESTS or self._clock.now() > give_up_at:
                    raise
                if str(exc) != shown:
                    shown = str(exc)
                    yield f"{pod.name}: waiting for its PodDisruptionBudget: {exc}"
                await asyncio.sleep(min(exc.retry_after_s or EVICT_AGAIN_S, EVICT_AGAIN_S))
            else:
                return


def _count(workloads: Sequence[Workload]) -> int:
    return sum(each.spec.replicas for each in workloads)


def _find(workloads: Sequence[Workload], name: str) -> Workload:
    for each in workloads:
        if each.name == name:
            return each
    raise FleetError(f"{name} has been deleted meanwhile")


def _names(pods: Sequence[Pod]) -> str:
    return ", ".join(sorted(pod.name for pod in pods)) or "none"


def _require_identities(workload: Workload, num: int) -> None:
    """Pass, or raise: a pod whose identity is not mounted would not start."""
    missing = find_without_identity(workload, pod_names(workload, workload.spec.replicas, num))
    if missing:
        raise FleetError(
            f"{workload.name} mounts no identity for {', '.join(missing)}: issue them (baton key "
            "issue), add them to the Secret, and set maxReplicas of the pool with `helm upgrade`"
        )
