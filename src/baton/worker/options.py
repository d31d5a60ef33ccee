"""What a worker and its process are built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from baton.config.cluster_key import is_wildcard
from baton.config.sections import PreemptionSection, StoreSection
from baton.errors import ConfigError
from baton.handoff.verify import VerificationPolicy
from baton.net.preemption import describe_plain_drain
from baton.protocol.announcements import require_https

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import HandoffMode
    from baton.config.sections import Tls
    from baton.ids import Epoch, WorkerId
    from baton.protocol.worker_http import Health
    from baton.worker.fence import MembershipFence

Role: TypeAlias = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One life of one worker, as HTTP shows it.

    `key` None serves without handoffs. `is_tls`: only holders of the key can connect; else
    `require_bearer` is for listeners beyond loopback.
    `topology` is where it is (`config/topology.py`).
    `max_default_tokens` bounds chat answers whose request sets no limit. `modes` are the ways of
    handing over that it takes part in, on either side. `fence`: of one that announces itself.
    `describe_drain`: what `/health` answers while it drains.
    """

    worker: WorkerId
    epoch: Epoch
    role: Role = "both"
    served_model_name: str
    credentials: Credentials | None = None
    require_bearer: bool = False
    is_tls: bool = False
    max_body_bytes: int = 32 * 1024 * 1024
    max_default_tokens: int = 4096
    request_timeout_s: float = 600.0
    num_traces: int = 1024
    transports: tuple[str, ...] = ()
    topology: str = ""
    modes: tuple[HandoffMode, ...] = ("push", "pull")
    fence: MembershipFence | None = None
    describe_drain: Callable[[], Health] = describe_plain_drain


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """The process that one worker lives in. `port` 0 takes a free one.

    `probe_port`: see `baton.net.probes`.
    `status_fd` is where JSON lines report to a launcher what happens (1: standard output).
    `parent_pid` set: the worker ends when that process does. `announce_to` are gateways to which it
    announces itself, as reached at `announce_url` (None: where it listens).

    Raises:
        ConfigError: it would announce an address that no gateway can use.
    """

    worker: WorkerId
    role: Role = "both"
    model: Path
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    probe_port: int | None = None
    credentials: Credentials
    tls: Tls = "control"
    engine: str = "transformers"
    engine_options: Mapping[str, object] = field(default_factory=dict)
    handoff_host: str = "127.0.0.1"
    handoff_port: int = 0
    topology: str = ""
    handoff_timeout_s: float = 60.0
    liveness_timeout_s: float = 3.0
    lease_s: float = 10.0
    handoff_encoding: str = "raw"
    staging_bytes: int = 256 * 1024 * 1024
    layer_batch_bytes: int = 4 * 1024 * 1024
    device_layer_batch_bytes: int = 128 * 1024 * 1024
    verification: VerificationPolicy = field(default_factory=VerificationPolicy)
    transports: tuple[str, ...] = ("shared", "tcp")
    transport_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    transport_choice: Literal["measured", "listed"] = "measured"
    probe_time_s: float = 0.5
    probe_bytes: int = 128 * 1024 * 1024
    store: StoreSection = field(default_factory=StoreSection)
    spin_s: float = 0.0005
    drain_timeout_s: float = 30.0
    preemption: PreemptionSection = field(default_factory=PreemptionSection)
    num_traces: int = 1024
    cpu_affinity: tuple[int, ...] = ()
    announce_to: tuple[str, ...] = ()
    announce_url: str | None = None
    announce_lease_s: float = 10.0
    parent_pid: int | None = None
    status_fd: int = 1

    def __post_init__(self) -> None:
        check_announcing(self.announce_to, self.announce_url, self.host)


def check_announcing(announce_to: Sequence[str], announce_url: str | None, host: str) -> None:
    """Pass, or raise.

    Raises:
        ConfigError: a worker would announce an address that no gateway can use, or at one that is
            not a gateway's.
    """
    require_https("worker.announce_to", announce_to)
    if announce_to and announce_url is None and is_wildcard(host):
        raise ConfigError(
            f"no gateway can reach {host}: give worker.announce_url, as https://host:port, or a "
            "worker.host that gateways can reach"
        )
