"""What an operator may set in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.config.sections import (
    Host,
    LeaseSeconds,
    Port,
    Seconds,
    Share,
    StoreSection,
    Table,
    Verification,
)
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Role: TypeAlias = Literal["prefill", "decode", "both"]

ROLES: Final[dict[str, Role]] = {
    "kv_producer": "prefill",
    "kv_consumer": "decode",
    "kv_both": "both",
}
"""vLLM's `kv_role` → the worker's role."""


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server's part in handoffs.

    Ports are those of rank 0: rank r takes `port + r`, or a free one where the port is 0.
    `poll_interval_ms` is how long a step without tokens may wait for the handoff's next event.
    `max_held_share` of the KV blocks may be held for decode workers to pull. `fingerprint`
    replaces the one that is computed from the checkpoint's files.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    handoff_host: Host = "127.0.0.1"
    handoff_port: Port = 0
    control_port: Port = 0
    transports: Annotated[tuple[str, ...], Meta(min_length=1)] = ("shared", "tcp")
    transport_options: dict[str, Table] = {}
    choice: Literal["measured", "listed"] = "measured"
    probe_time_s: Seconds = 0.5
    probe_bytes: Annotated[int, Meta(ge=1)] = 128 * 1024 * 1024
    spin_s: Annotated[float, Meta(ge=0, le=0.01)] = 0.0005
    preferred_op: Literal["WRITE", "READ"] = "READ"
    handoff_timeout_s: Seconds = 60.0
    liveness_timeout_s: Seconds = 3.0
    lease_s: LeaseSeconds = 10.0
    single_send_max_tokens: Annotated[int, Meta(ge=0)] = 256
    verify_same_process: Verification = "full"
    verify_same_host: Verification = "full"
    verify_network: Verification = "full"
    verify_share: Share = 0.125
    staging_bytes: Annotated[int, Meta(ge=0)] = 256 * 1024 * 1024
    max_held_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    poll_interval_ms: Annotated[float, Meta(ge=0, le=1000)] = 10.0
    fingerprint: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    key_file: str | None = None
    store: StoreSection = msgspec.field(default_factory=StoreSection)


def read_options(extra: Mapping[str, object]) -> ConnectorOptions:
    """Check `kv_connector_extra_config`.

    Raises:
        ConfigError: an unknown key, or a value that its key does not allow.
    """
    known = ConnectorOptions.__struct_fields__
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has unknown keys: {', '.join(unknown)}; "
            f"known are {', '.join(known)}"
        )
    try:
        return msgspec.convert(dict(extra), ConnectorOptions)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"kv_connector_extra_config: {exc}") from exc


def read_role(kv_role: str | None) -> Role:
    """The worker's role.

    Raises:
        ConfigError: vLLM was given no role.
    """
    if kv_role not in ROLES:
        raise ConfigError(f"kv_role is {kv_role!r}; set one of {', '.join(ROLES)}")
    return ROLES[kv_role]
