"""What a worker reports of itself: decoded, and compared with how it is listed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from yarl import URL

from baton.config.cluster_key import is_loopback
from baton.errors import UNDECODABLE, ProtocolError
from baton.protocol.worker_http import Health, Role, WorkerInfo

if TYPE_CHECKING:
    from baton.gateway.options import WorkerAddress

KV_ROLES: Final = {
    Role.PREFILL: "kv_producer",
    Role.DECODE: "kv_consumer",
    Role.BOTH: "kv_both",
}

_decoder = msgspec.json.Decoder(WorkerInfo)
_health_decoder = msgspec.json.Decoder(Health)


def read_health(body: bytes) -> Health:
    """A worker's answer to `/health`: its load and clock, as far as they are given and decode."""
    try:
        return _health_decoder.decode(body)
    except UNDECODABLE:
        return Health()


def read_info(body: bytes) -> WorkerInfo:
    """Decode and bounds-check.

    Raises:
        ProtocolError: not what the wire format allows.
    """
    try:
        return _decoder.decode(body)
    except UNDECODABLE as exc:
        raise ProtocolError(f"its worker info does not decode: {exc}") from exc


def why_not_used(info: WorkerInfo, listed: WorkerAddress) -> str | None:
    """Why a worker cannot be used as the operator listed it; None if it can."""
    if info.role not in {listed.role, Role.BOTH}:
        return (
            f"it was listed as a {listed.role} worker but was started with the role {info.role}; "
            f"list it as {_option(info.role)}, or start it with {_role_setting(info, listed.role)}"
        )
    return why_not_asked(info, listed.origin)


def why_not_asked(info: WorkerInfo, listed: URL) -> str | None:
    """Why its control addresses are not believed; None if they are.

    They come from the worker, and get the cluster's bearer token: an answer must not be able to
    make the gateway send that, or any request, to a host that the operator never named.
    """
    for text in info.control_urls:
        if (control := _origin(text)) is None:
            return f"its control address {text!r} is not https://host:port"
        if listed.scheme == "https" != control.scheme:
            return f"its control address {text} has no TLS, as {listed.origin()} has"
        if not is_same_host(control.host or "", listed.host or ""):
            return (
                f"its control address {text} is not on the host by which it is listed, "
                f"{listed.host}; start it with "
                f'"kv_connector_extra_config": {{"handoff_host": "{listed.host}"}}'
            )
    return None


def _origin(text: str) -> URL | None:
    try:
        url = URL(text)
        is_origin = url.scheme in {"http", "https"} and url.host is not None and url.user is None
        return url if is_origin and url == url.origin() else None
    except ValueError:
        return None


def is_same_host(host: str, listed: str) -> bool:
    """Whether the host that a worker reports is the one by which the operator listed it."""
    return host == listed or (is_loopback(host) and is_loopback(listed))


def _option(role: Role) -> str:
    return "--worker" if role is Role.BOTH else f"--{role}"


def _role_setting(info: WorkerInfo, role: Role) -> str:
    return f'"kv_role": "{KV_ROLES[role]}"' if info.protocol == "vllm" else f"the role {role}"
