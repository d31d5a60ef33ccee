"""Waits until Kubernetes has done what was asked for: each with a deadline, and lines of progress.

What is in the way of a pod is shown when it changes. The API server may be away for `AWAY_S`.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Final, TypeVar

from baton.clock import MachineClock
from baton.launch.errors import FleetError
from baton.launch.kubernetes.api import FleetApi, KubernetesFleetError
from baton.launch.kubernetes.members import describe_pod, find_role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection

    from baton.launch.fleet import FleetMember
    from baton.launch.kubernetes.objects import Pod, Workload

LOOK_INTERVAL_S: Final = 1.0
AWAY_S: Final = 30.0
"""For how long the API server may be away while a command waits."""
START_MARGIN_S: Final = 600.0
"""For a pod to get a node and its image, before its startup probe's time begins."""
END_MARGIN_S: Final = 60.0
"""How much longer than its grace period a pod may take to be gone."""
FAILED_S: Final = 120.0
"""How long a pod may fail before the command returns; Kubernetes goes on trying."""
PLACE_S: Final = 300.0
"""How long a pod may have no node, which may have to be made, before the command returns."""

T = TypeVar("T")
_clock = MachineClock()


class ReleaseWatch:
    """Looks at one release again and again. Owner: one event loop."""

    def __init__(self, api: FleetApi, release: str) -> None:
        self._api, self._release = api, release
        self._shown: dict[str, str] = {}

    async def until_ready(self, names: Collection[str], timeout_s: float) -> AsyncIterator[str]:
        """Until all of these pods serve.

        Raises:
            FleetError: one does not, in time, or it failed for `FAILED_S`, or had no node for
                `PLACE_S`.
        """
        missing, give_up_at = set(names), dict[tuple[str, float], float]()
        last: dict[str, FleetMember] = {}
        async for pods in self._looks(self._list_pods, timeout_s):
            last = {each.name: each for each in _describe(pods) if each.name in missing}
            for member in last.values():
                if member.state == "ready":
                    missing.discard(member.name)
                    yield f"{member.name}: ready at {member.url}"
            if not missing:
                return
            for line in self._changed_reasons(last.values()):
                yield line
            limits = [(name, _give_up_after_s(last.get(name))) for name in missing]
            now = _clock.now()
            give_up_at = {key: give_up_at.get(key, now + key[1]) for key in limits}
            if any(at < now for at in give_up_at.values()):
                break
        reasons = [f"{name}: {_reason(last.get(name))}" for name in sorted(missing)]
        raise FleetError(
            f"not ready: {'; '.join(reasons)}. Kubernetes goes on trying; `baton logs NAME` shows "
            "what a process wrote, and `baton scale` with the number of before takes them out"
        )

    async def until_gone(self, pods: Collection[Pod], timeout_s: float) -> AsyncIterator[str]:
        """Until these pods have ended.

        Raises:
            FleetError: one has not, in time.
        """
        left = {pod.metadata.uid: pod.name for pod in pods}
        async for found in self._looks(self._list_pods, timeout_s):
            present = {pod.metadata.uid for pod in found}
            for uid in [uid for uid in left if uid not in present]:
                yield f"{left.pop(uid)}: ended"
            if not left:
                return
        raise FleetError(
            f"{', '.join(left.values())} had to end within {timeout_s:g} s, and is there still: is "
            "its node away? `kubectl describe pod` shows it"
        )

    async def until_rolled_out(self, workload: Workload) -> AsyncIterator[str]:
        """Until all pods have the present template and are available.

        Raises:
            FleetError: no pod was replaced for as long as one may take, or one keeps failing.
        """
        kind = workload.kind or "StatefulSet"
        step_s = workload.startup_s + workload.grace_s + START_MARGIN_S
        num_replaced, since, failing_since = -1, _clock.now(), None

        async def look() -> tuple[Workload, tuple[Pod, ...]]:
            pods = await self._list_pods()
            found = await self._api.list_workloads(kind, self._release)
            for each in found:
                if each.name == workload.name:
                    return each, pods
            raise FleetError(f"the {kind} {workload.name} has been deleted meanwhile")

        members: list[FleetMember] = []
        async for present, pods in self._looks(look, step_s * (workload.spec.replicas + 1)):
            if present.is_rolled_out:
                yield f"{workload.name}: all {present.spec.replicas} replaced"
                return
            if present.num_replaced != num_replaced:
                num_replaced, since = present.num_replaced, _clock.now()
                yield f"{workload.name}: {num_replaced} of {present.spec.replicas} replaced"
            members = [each for each in _describe(pods) if _is_of(each.name, workload)]
            for line in self._changed_reasons(members):
                yield line
            failed = [each for each in members if each.state == "failed"]
            failing_since = (failing_since or _clock.now()) if failed else None
            if failing_since is not None and _clock.now() - failing_since > FAILED_S:
                break
            if _clock.now() - since > step_s:
                break
        unready = [each for each in members if each.state != "ready"]
        in_the_way = "; ".join(f"{each.name}: {_reason(each)}" for each in unready)
        raise FleetError(
            f"the upgrade stopped at {workload.name}, with {num_replaced} of "
            f"{workload.spec.replicas} pods replaced; in its way: {in_the_way or 'not known'}. The "
            "others serve on. Correct the cause, or go back with `kubectl rollout undo "
            f"{kind.lower()}/{workload.name}` or `helm rollback`"
        )

    async def _list_pods(self) -> tuple[Pod, ...]:
        return await self._api.list_pods(self._release)

    async def _looks(self, look: Callable[[], Awaitable[T]], timeout_s: float) -> AsyncGenerator[T]:
        """What `look` returns, at intervals, until the time is over."""
        deadline, seen_at = _clock.now() + timeout_s, _clock.now()
        while True:
            try:
                found = await look()
            except KubernetesFleetError as exc:
                if not exc.is_temporary or _clock.now() - seen_at > AWAY_S:
                    raise FleetError(
                        f"{exc}; what was asked for goes on without this command: `baton status` "
                        "shows how far it is"
                    ) from exc
            else:
                seen_at = _clock.now()
                yield found
            if _clock.now() > deadline:
                return
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _changed_reasons(self, members: Collection[FleetMember]) -> list[str]:
        lines = []
        for member in members:
            before = self._shown.get(member.name, "")
            self._shown[member.name] = member.reason
            if member.reason not in {"", before}:
                lines.append(f"{member.name}: {member.reason}")
        return lines


def _describe(pods: Collection[Pod]) -> list[FleetMember]:
    now_s = _clock.unix_now()
    return [describe_pod(pod, find_role(pod) or "gateway", now_s) for pod in pods]


def _is_of(pod: str, workload: Workload) -> bool:
    """Whether a pod's name is that of one of a workload's."""
    rest = pod.removeprefix(f"{workload.name}-")
    return rest != pod and (workload.kind == "Deployment" or rest.isdecimal())


def _give_up_after_s(member: FleetMember | None) -> float:
    """How long a pod may be in its present state."""
    if member is not None and member.state == "failed":
        return FAILED_S
    return inf if member is not None and member.host else PLACE_S


def _reason(member: FleetMember | None) -> str:
    if member is None:
        return "there is no such pod; a quota, or a controller that is away?"
    return member.reason or f"it is {member.state}"
