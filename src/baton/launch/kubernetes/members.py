"""A pod as a process of a fleet: its role, its state, and what is wrong with it. No I/O."""

from __future__ import annotations

from typing import Final

from baton.launch.fleet import FleetMember, MemberRole, MemberState
from baton.launch.kubernetes.objects import ROLE_LABEL, Container, ContainerStatus, Pod

ROLES: Final = frozenset[MemberRole]({"prefill", "decode", "both"})
FAILED: Final = frozenset({
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
})
"""Reasons for which a container waits, and that do not pass by themselves as a rule."""
ENDED: Final = frozenset({"Failed", "Succeeded"})
"""Phases of pods that have ended: their controllers start others, and they are kept to be read."""
MAX_REASON_CHARS: Final = 300


def find_role(pod: Pod) -> MemberRole | None:
    """None: it is neither a worker nor a gateway."""
    role = pod.metadata.labels.get(ROLE_LABEL)
    if pod.component == "worker" and role in ROLES:
        return role
    return "gateway" if pod.component == "gateway" else None


def describe_pod(pod: Pod, role: MemberRole, unix_now_s: float) -> FleetMember:
    """A pod at one moment."""
    container = pod.status.container_statuses[0] if pod.status.container_statuses else None
    status = container or ContainerStatus()
    state, reason = _find_state(pod, status)
    running = status.state.running
    started = None if running is None else running.started_at
    labels = pod.metadata.labels
    return FleetMember(
        name=pod.name,
        role=role,
        state=state,
        host=pod.spec.node_name,
        url=_find_url(pod, role),
        num_restarts=status.restart_count,
        up_s=None if started is None else max(0.0, unix_now_s - started.timestamp()),
        labels={
            key: labels[f"baton/{key}"] for key in ("pool", "rack") if f"baton/{key}" in labels
        },
        reason=reason[:MAX_REASON_CHARS],
    )


def missing_member(name: str, role: MemberRole) -> FleetMember:
    """A pod that a StatefulSet wants, and that is not there."""
    return FleetMember(
        name=name,
        role=role,
        state="starting",
        host="",
        reason="its StatefulSet has not made the pod yet (a quota? kubectl describe statefulset)",
    )


def _find_state(pod: Pod, container: ContainerStatus) -> tuple[MemberState, str]:
    ended = _describe_end(container)
    if pod.metadata.deletion_timestamp is not None:
        return "draining", ended
    if pod.status.phase in ENDED:
        return "ended", ended
    if (waiting := container.state.waiting) is not None:
        parts = (waiting.reason, waiting.message, ended)
        reason = ": ".join(part for part in parts if part)
        return ("failed" if waiting.reason in FAILED else "starting"), reason
    conditions = {each.type: each for each in pod.status.conditions}
    placed = conditions.get("PodScheduled")
    if placed is not None and placed.status != "True":
        return "starting", f"{placed.reason}: {placed.message}".strip(": ")
    if container.state.running is None:
        return "starting", ended
    ready = conditions.get("Ready")
    if ready is not None and ready.status == "True":
        return "ready", ended
    if container.started:
        return "failed", "it does not pass its readiness probe"
    return "starting", ended


def _describe_end(container: ContainerStatus) -> str:
    """How the container's process ended last, if it ever did."""
    last = container.state.terminated or container.last_state.terminated
    if last is None:
        return ""
    reason = f" ({last.reason})" if last.reason not in {"", "Error", "Completed"} else ""
    return f"the last one ended with exit code {last.exit_code}{reason}"


def _find_url(pod: Pod, role: MemberRole) -> str | None:
    """Where it answers HTTP; None: it has no address yet."""
    if not pod.status.pod_ip or not pod.spec.containers:
        return None
    container = pod.spec.containers[0]
    port = next((each.container_port for each in container.ports if each.name == "http"), None)
    if port is None:
        return None
    host = pod.status.pod_ip
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if _uses_tls(container, role) else 'http'}://{shown}:{port}"


def _uses_tls(container: Container, role: MemberRole) -> bool:
    """As the chart sets it in variables."""
    variables = {each.name: each.value for each in container.env}
    if role == "gateway":
        return bool(variables.get("BATON_GATEWAY__TLS_CERTIFICATE"))
    return variables.get("BATON_SECURITY__TLS", "off") != "off"
