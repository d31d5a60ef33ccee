"""The sections of a configuration file. docs/configuration.md describes every key.

`Table` fields are open: their keys belong to a plug-in, whose own schema checks them.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

Table: TypeAlias = dict[str, object]

Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
Price: TypeAlias = Annotated[float, Meta(ge=0)]
SecondsOrNone: TypeAlias = Annotated[float, Meta(ge=0)]
LeaseSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=3600)]
Core: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Host: TypeAlias = Annotated[str, Meta(min_length=1)]

Role: TypeAlias = Literal["prefill", "decode", "both"]
NumaNode: TypeAlias = Annotated[int, Meta(ge=0, le=1023)] | Literal["auto"]
MoveStreams: TypeAlias = Literal["never", "drain", "auto"]
Mode: TypeAlias = Literal["auto", "push", "pull", "pool", "reference", "colocated"]
Verification: TypeAlias = Literal["full", "sampled", "identity"]
PreemptionSource: TypeAlias = Literal["none", "file", "aws", "gcp", "azure"]
RayPlacement: TypeAlias = Literal["spread", "strict_spread", "pack", "strict_pack"]
"""How Ray divides a role's workers among hosts: placement groups of these strategies."""
Spread: TypeAlias = Literal["none", "host", "rack", "zone"]
"""Which of these has at most half of a role's workers, rounded up."""
Amount: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
ErrorBudget: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
"""See `baton.encodings.error_budget`."""
Tls: TypeAlias = Literal["off", "control", "all"]
"""What is encrypted: HTTP between gateway and workers (`control`), and pages over `tcp` (`all`)."""
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["text", "json"]


class ClusterSection(Struct, frozen=True, kw_only=True):
    """What gateway and workers share. The key itself is a secret and never stands in a file."""

    key_file: str | None = None


class SecuritySection(Struct, frozen=True, kw_only=True):
    """How processes of the cluster speak with each other.

    `identity` is a directory with a certificate and its key; without it they are derived.
    """

    tls: Tls = "control"
    identity: str | None = None


class GatewaySection(Struct, frozen=True, kw_only=True):
    """The gateway: where it listens, which workers it knows, what it admits."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    processes: PositiveCount = 1
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    members_interval_s: Seconds = 2.0
    max_connections: PositiveCount = 4096
    max_connections_per_address: PositiveCount = 1024
    max_inflight_requests: PositiveCount = 1024
    max_body_bytes: PositiveCount = 32 * 1024 * 1024
    max_body_bytes_per_token: PositiveCount = 64
    max_total_body_bytes: PositiveCount = 512 * 1024 * 1024
    max_answer_bytes: PositiveCount = 64 * 1024 * 1024
    max_answers: PositiveCount = 128
    max_total_record_bytes: Count = 256 * 1024 * 1024
    max_running_per_worker: PositiveCount | None = None
    max_queued_requests: PositiveCount = 1024
    max_queued_tokens: PositiveCount = 4 * 1024 * 1024
    max_queued_per_tenant: PositiveCount | None = None
    request_timeout_s: Seconds = 600.0
    first_byte_timeout_s: Seconds = 300.0
    connect_timeout_s: Seconds = 3.0
    prefill_grace_period_s: Seconds = 2.0
    probe_interval_s: Seconds = 1.0
    probe_timeout_s: Seconds = 2.0
    abandon_after_s: Seconds = 15.0
    silent_after_s: Annotated[float, Meta(ge=2, le=3600)] = 2.75
    ejection_s: Seconds = 5.0
    slow_start_s: SecondsOrNone = 10.0
    wait_for_worker_s: SecondsOrNone = 5.0
    retry_budget: Share = 0.2
    drain_timeout_s: Seconds = 30.0
    mode: Mode = "auto"
    first_token_early: bool = False
    move_streams: MoveStreams = "auto"
    tls_certificate: str | None = None
    tls_key: str | None = None
    client_keys_file: str | None = None
    insecure: bool = False
    audit_log: str | None = None
    management_host: Host = "127.0.0.1"
    management_port: Port | None = None
    management_key_file: str | None = None
    announce_host: Host = "127.0.0.1"
    announce_port: Port | None = None
    announce_url: str | None = None
    peers: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()


class WorkerSection(Struct, frozen=True, kw_only=True):
    """One worker: its part, where it listens, and the model and engine inside it."""

    name: Annotated[str, Meta(min_length=1, max_length=128)] = "worker"
    role: Role = "both"
    host: Host = "127.0.0.1"
    port: Port = 0
    probe_port: Port | None = None
    handoff_host: Host = "127.0.0.1"
    handoff_port: Port = 0
    topology: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    engine: str = "transformers"
    cpu_affinity: tuple[Core, ...] = ()
    numa_node: NumaNode | None = None
    drain_timeout_s: Seconds = 30.0
    announce_to: tuple[str, ...] = ()
    announce_url: str | None = None
    announce_lease_s: Annotated[float, Meta(ge=0.5, le=3600)] = 10.0


class PreemptionSection(Struct, frozen=True, kw_only=True):
    """From where a worker learns that its machine will be taken (`baton.net.preemption`).

    `{worker}` in `file` stands for the worker's name. `url` None: the metadata service's own.
    `notice_s`: how long before its machine's end a notice comes that names no time.
    """

    source: PreemptionSource = "none"
    file: str = "/run/baton/preempted"
    url: str | None = None
    interval_s: Seconds = 2.0
    notice_s: Annotated[float, Meta(ge=1, le=3600)] = 30.0


def _check_one_is_set(encoding: str, error_budget: float | None) -> None:
    if error_budget is not None and encoding != "raw":
        raise ValueError(f'encoding = "{encoding}" and error_budget = {error_budget}: set one only')


class HandoffSection(Struct, frozen=True, kw_only=True):
    """How long a handoff may take, how a silent peer is noticed, and how much is verified.

    `timeout_s` counts from the last sign of life of a prefill engine that has the prompt queued.

    `verify_*`: which bytes are compared with their digests, by the kind of path that they took.

    `encoding` is how KV may be written (`baton.encodings`) where a link is slow, in at most
    `staging_bytes`; with `error_budget` instead, all encodings of at most so much error.
    """

    encoding: Annotated[str, Meta(min_length=1, max_length=64)] = "raw"
    error_budget: ErrorBudget | None = None
    staging_bytes: PositiveCount = 256 * 1024 * 1024
    timeout_s: Seconds = 60.0
    liveness_timeout_s: Seconds = 3.0
    lease_s: LeaseSeconds = 10.0
    layer_batch_bytes: Count = 4 * 1024 * 1024
    device_layer_batch_bytes: Count = 128 * 1024 * 1024
    verify_same_process: Verification = "full"
    verify_same_host: Verification = "full"
    verify_network: Verification = "full"
    verify_share: Share = 0.125

    def __post_init__(self) -> None:
        """Only one of the two can decide."""
        _check_one_is_set(self.encoding, self.error_budget)


class TransferSection(Struct, frozen=True, kw_only=True):
    """Which transports may be used, each one's own options, and how one is chosen.

    `probe_*` bound the measuring of all links with one peer, in one direction.
    """

    transports: Annotated[tuple[str, ...], Meta(min_length=1)] = ("shared", "tcp")
    choice: Literal["measured", "listed"] = "measured"
    probe_time_s: Seconds = 0.5
    probe_bytes: PositiveCount = 128 * 1024 * 1024
    spin_s: Annotated[float, Meta(ge=0, le=0.01)] = 0.0005
    options: dict[str, Table] = {}


class TargetsTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When requests for a model are to have their first token, and each token after it.

    `itl_s`: the gaps between two tokens of an answer, all but 1 % of them.
    """

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    itl_s: Seconds | None = None


class RouterSection(Struct, frozen=True, kw_only=True):
    """How a gateway chooses workers: a policy, and each policy's own options.

    No `policy`: `cost` for several workers of which some do both parts, else `round_robin`.

    `targets` by model; `"*"`: for those that are not named.

    `tokenizers`: models' folders by name, where no worker's own can be read by the gateway.
    `costs_file`: what is learned of workers' speed is kept there.
    """

    policy: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    options: dict[str, Table] = {}
    tokenizers: dict[str, str] = {}
    targets: dict[str, TargetsTable] = {}
    costs_file: str | None = None


class StoreSection(Struct, frozen=True, kw_only=True):
    """Where KV is kept: for mode pool and, with `prefixes`, for later prompts. No `tiers`: nowhere.

    The same for all workers that share it. An entry has `block_size` tokens, whatever an engine's
    blocks have, and `num_parts` shares of the heads: a multiple of every tensor-parallel size.
    `encoding` is how its numbers are written (`baton.encodings`); with `error_budget` instead, in
    the one of the fewest bytes with at most so much error. `keep_share`: of a core, while an engine
    computes, for keeping what it has computed; 1: all of it at once. `admission`: "second": blocks
    are kept when a worker has them to keep for the second time.
    """

    tiers: tuple[str, ...] = ()
    encoding: Annotated[str, Meta(min_length=1, max_length=64)] = "raw"
    error_budget: ErrorBudget | None = None
    block_size: Annotated[int, Meta(ge=1, le=65_536)] = 64
    num_parts: Annotated[int, Meta(ge=1, le=1024)] = 1
    prefixes: bool = True
    keep_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    admission: Literal["always", "second"] = "always"
    options: dict[str, Table] = {}

    def __post_init__(self) -> None:
        """Only one of the two can decide."""
        _check_one_is_set(self.encoding, self.error_budget)


class UpSection(Struct, frozen=True, kw_only=True):
    """What `baton up` starts; `*_engine` overrides `[engine]` for workers of one role.

    `*_engine_name` None is `worker.engine`.
    """

    prefill: Count = 1
    decode: Count = 1
    prefill_engine_name: str | None = None
    decode_engine_name: str | None = None
    prefill_engine: Table = {}
    decode_engine: Table = {}


class RayWorkersTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where Ray may place the workers of one role, and what each of them needs of its host.

    `labels`: each `label=value`, `label=!value`, `label=in(a,b)` or `label=!in(a,b)`. `within`: a
    label that is to have one value for all of them, such as `rack`.
    """

    labels: tuple[str, ...] = ()
    gpus: Amount = 0.0
    cpus: Amount = 0.0
    memory_bytes: Count = 0
    placement: RayPlacement | None = None
    within: str | None = None


class RaySection(Struct, frozen=True, kw_only=True):
    """What `baton up --on ray` needs beside `[up]`; `workers` by role.

    `address` None: RAY_ADDRESS, else the cluster of this host. `least_cpus`: what Ray counts for a
    process without `cpus`: with nothing, its host would be idle to Ray's autoscaler.
    """

    address: str | None = None
    gateways: PositiveCount = 1
    gateway_labels: tuple[str, ...] = ()
    workers: dict[str, RayWorkersTable] = {}
    least_cpus: Amount = 0.001
    timeout_s: Seconds = 60.0
    insecure: bool = False


class KubernetesSection(Struct, frozen=True, kw_only=True):
    """What commands with `--on kubernetes` need. `context` None: the kubeconfig's current one."""

    context: str | None = None


class HostTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A host of a fleet: where it is, and what its workers may use of it.

    `labels` are those beside `host` (its name), `rack` and `zone`. An empty `zone` or `rack` is not
    known.
    """

    name: Annotated[str, Meta(min_length=1)]
    zone: str = ""
    rack: str = ""
    gpus: Amount = 0.0
    cpus: Amount = 0.0
    memory_bytes: Count = 0
    labels: dict[str, str] = {}


class FleetSection(Struct, frozen=True, kw_only=True):
    """Which host each worker is to start on, and what `baton plan` decides that by.

    `assignments`: `zone/rack/host` by a worker's name. `near`: `baton up --on ray` decides by
    itself. `links`: GB/s between two workers by their distance. The KV that is expected is that of
    `requests_per_s` prompts of `prompt_tokens`.
    """

    hosts: tuple[HostTable, ...] = ()
    assignments: dict[str, str] = {}
    near: bool = False
    spread: Spread = "none"
    links: dict[str, Annotated[float, Meta(gt=0)]] = {}
    requests_per_s: Annotated[float, Meta(gt=0)] = 1.0
    prompt_tokens: PositiveCount = 2048


class ScalingSection(Struct, frozen=True, kw_only=True):
    """How `baton autoscale` sizes a fleet: for what, how fast, within which bounds and price.

    `gateways` are URLs of all gateway processes, or of their management listeners; `dns:URL`: each
    address of the URL's host is one. `model` None: the one that they serve. A fleet has prefill and
    decode workers, or those that do both (`max_both`).
    """

    gateways: tuple[str, ...] = ("http://127.0.0.1:8000",)
    model: str | None = None
    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.1
    good_share: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    headroom: Annotated[float, Meta(ge=1, le=10)] = 1.2
    interval_s: Seconds = 5.0
    grow_every_s: Seconds = 30.0
    shrink_after_s: Seconds = 300.0
    min_prefill: Count = 1
    max_prefill: Count = 4
    min_decode: Count = 1
    max_decode: Count = 4
    min_both: Count = 0
    max_both: Count = 0
    price_prefill: Price = 1.0
    price_decode: Price = 1.0
    price_both: Price = 1.0
    max_price: Price | None = None
    metrics_port: Port | None = None


class TraceSection(Struct, frozen=True, kw_only=True):
    """Which finished requests' traces are remembered, and which are exported.

    Slow are requests beyond `slow_quantile` of the latest ones, and those whose first token takes
    longer than `slow_ttft_s`. `sample_share`: of requests whose clients decide nothing.
    """

    ring_size: PositiveCount = 1024
    kept_size: PositiveCount = 256
    slow_quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.99
    slow_ttft_s: Seconds | None = None
    sample_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    otlp_endpoint: Annotated[str, Meta(pattern=r"^https?://[^\s]+\Z")] | None = None


class AlertsSection(Struct, frozen=True, kw_only=True):
    """When a gateway raises alerts, and where it posts them (docs/observability/alerts.md).

    `disabled` are names of alerts. Thresholds: `inversion_ratio` of a nearer to a farther distance,
    `store_ratio` of loading to computing, `link_loss_share` of TCP segments that were lost,
    `prefix_share` of predicted tokens that were cached, `lapsed_leases` within 5 minutes.
    `good_share`: of requests that are to meet their target.
    """

    webhook_url: str | None = None
    runbook_url: str = "docs/observability/alerts.md"
    disabled: tuple[str, ...] = ()
    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    inversion_ratio: Annotated[float, Meta(ge=1)] = 1.5
    store_ratio: Annotated[float, Meta(ge=1)] = 1.2
    link_loss_share: Annotated[float, Meta(gt=0, le=1)] = 0.005
    prefix_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    lapsed_leases: PositiveCount = 3
    good_share: Annotated[float, Meta(gt=0, lt=1)] = 0.95


class LogSection(Struct, frozen=True, kw_only=True):
    """What is logged, and as what."""

    level: LogLevel = "info"
    format: LogFormat = "text"


class Config(Struct, frozen=True, kw_only=True):
    """The whole configuration."""

    cluster: ClusterSection = msgspec.field(default_factory=ClusterSection)
    security: SecuritySection = msgspec.field(default_factory=SecuritySection)
    gateway: GatewaySection = msgspec.field(default_factory=GatewaySection)
    worker: WorkerSection = msgspec.field(default_factory=WorkerSection)
    engine: Table = {}
    preemption: PreemptionSection = msgspec.field(default_factory=PreemptionSection)
    handoff: HandoffSection = msgspec.field(default_factory=HandoffSection)
    transfer: TransferSection = msgspec.field(default_factory=TransferSection)
    router: RouterSection = msgspec.field(default_factory=RouterSection)
    store: StoreSection = msgspec.field(default_factory=StoreSection)
    up: UpSection = msgspec.field(default_factory=UpSection)
    ray: RaySection = msgspec.field(default_factory=RaySection)
    kubernetes: KubernetesSection = msgspec.field(default_factory=KubernetesSection)
    fleet: FleetSection = msgspec.field(default_factory=FleetSection)
    scaling: ScalingSection = msgspec.field(default_factory=ScalingSection)
    alerts: AlertsSection = msgspec.field(default_factory=AlertsSection)
    trace: TraceSection = msgspec.field(default_factory=TraceSection)
    log: LogSection = msgspec.field(default_factory=LogSection)
