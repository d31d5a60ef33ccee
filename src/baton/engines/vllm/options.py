"""Options of the connector (`kv_connector_extra_config`) and of a vLLM server (`[engine]`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from baton.config.sections import (
    ErrorBudget,
    Host,
    LeaseSeconds,
    Port,
    Seconds,
    Share,
    StoreSection,
    Table,
    Tls,
    Verification,
)
from baton.errors import ConfigError
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLES: Final[dict[str, Role]] = {
    "kv_producer": Role.PREFILL,
    "kv_consumer": Role.DECODE,
    "kv_both": Role.BOTH,
}
"""vLLM's `kv_role` → the worker's role."""


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server's part in handoffs.

    Ports are those of rank 0: rank r takes `port + r`, or a free one where the port is 0.
    `poll_interval_ms` is how long a step without tokens may wait for the handoff's next event: less
    where the last one was a short time ago.
    `max_held_share` of the KV blocks may be held for decode workers to pull, and `max_kept_share`
    while they are copied into the store; more is not kept. `fingerprint`
    replaces the one that is computed from the checkpoint's files. `handoff_encoding`: KV may be
    written so on slow links, in at most `staging_bytes`; with `handoff_error_budget` instead, in
    each encoding of at most that error. `clients_are_gateways`: the server answers no client that
    has not proved to be a gateway, so that tickets are believed.
    `resumes_streams`: Baton extended the server, so that streams go on here from token ids.
    `relayed_kv_events`: the endpoint whose events the server's own process passes on to gateways.
    `lease_file`: of a server that announces itself, until when it may write to others.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    handoff_host: Host = "127.0.0.1"
    handoff_port: Port = 0
    control_port: Port = 0
    topology: str | None = None
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
    layer_batch_bytes: Annotated[int, Meta(ge=0)] = 4 * 1024 * 1024
    device_layer_batch_bytes: Annotated[int, Meta(ge=0)] = 128 * 1024 * 1024
    verify_same_process: Verification = "full"
    verify_same_host: Verification = "full"
    verify_network: Verification = "full"
    verify_share: Share = 0.125
    staging_bytes: Annotated[int, Meta(ge=0)] | None = None
    handoff_encoding: Annotated[str, Meta(min_length=1, max_length=64)] = "raw"
    handoff_error_budget: ErrorBudget | None = None
    max_held_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    max_kept_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    poll_interval_ms: Annotated[float, Meta(ge=0, le=1000)] = 10.0
    fingerprint: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    key_file: str | None = None
    tls: Tls = "control"
    identity: str | None = None
    clients_are_gateways: bool = False
    resumes_streams: bool = False
    relayed_kv_events: str | None = None
    lease_file: str | None = None
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
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        raise ConfigError(f"kv_connector_extra_config: {exc}") from exc


def read_role(kv_role: str | None) -> Role:
    """The worker's role.

    Raises:
        ConfigError: vLLM was given no role.
    """
    if kv_role not in ROLES:
        raise ConfigError(f"kv_role is {kv_role!r}; set one of {', '.join(ROLES)}")
    return ROLES[kv_role]


PositiveInt = Annotated[int, msgspec.Meta(ge=1)]

OWNED_FLAGS: Final[dict[str, str]] = {
    "--model": "worker.model",
    "--host": "worker.host",
    "--port": "worker.port",
    "--served-model-name": "worker.served_model_name",
    "--kv-transfer-config": "Baton's connector",
    "--shutdown-timeout": "worker.drain_timeout_s",
    "--uds": "worker.port",
}
"""vLLM's flags that `arguments` may not hold → what sets them here."""


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `[engine]` with `worker.engine = "vllm"`; None leaves the choice to vLLM.

    On CPUs Baton has defaults of its own, so that vLLM starts fast and takes little:
    `kv_cache_bytes` 512 MiB, `enforce_eager` true, as many threads as cores, `max_context_tokens`
    as many as fit the KV cache. `multiprocessing` None starts processes for
    tensor-parallel ranks only if there is more than one. `speculative` is vLLM's own speculative
    configuration. `kv_events` publishes which blocks are cached, to this user's processes.
    `max_kept_share` of the blocks may be held while they are copied into the store.
    `control_port`: see `ConnectorOptions`. `arguments` are further flags of vLLM's.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context_tokens: PositiveInt | None = None
    block_size: PositiveInt | None = None
    kv_cache_bytes: PositiveInt | None = None
    kv_cache_dtype: Annotated[str, msgspec.Meta(min_length=1)] = "auto"
    enforce_eager: bool | None = None
    num_threads: PositiveInt | None = None
    tensor_parallel_size: PositiveInt = 1
    max_num_batched_tokens: PositiveInt | None = None
    prefix_caching: bool = True
    speculative: dict[str, object] | None = None
    kv_events: bool = True
    max_kept_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    multiprocessing: bool | None = None
    control_port: Port = 0
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; msgspec reports the ValueError as it does its own."""
        if self.multiprocessing is False and self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {self.tensor_parallel_size} needs multiprocessing"
            )
        for word in self.arguments:
            # vLLM takes `--a_flag` for `--a-flag`, and `--a-flag.key` for a part of its value.
            flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
            owner = OWNED_FLAGS.get(flag)
            if owner is not None:
                raise ValueError(f"arguments may not hold {word}: {owner} decides that")

    @property
    def uses_processes(self) -> bool:
        """Whether each tensor-parallel rank gets a process of its own."""
        if self.multiprocessing is None:
            return self.tensor_parallel_size > 1
        return self.multiprocessing


CPU_BLOCK_TOKENS: Final = 32


def require_cpu_block_size(options: VllmOptions) -> None:
    """Refuse early what vLLM's attention on CPUs refuses late.

    Raises:
        ConfigError: `block_size` is no multiple of 32.
    """
    if options.block_size is not None and options.block_size % CPU_BLOCK_TOKENS:
        raise ConfigError(
            f"engine.block_size is {options.block_size}: vLLM on CPUs takes multiples of "
            f"{CPU_BLOCK_TOKENS}"
        )
