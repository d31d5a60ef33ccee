"""What a worker and its process are built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.cluster_key import is_wildcard
from baton.config.sections import (
    HandoffSection,
    PreemptionSection,
    StoreSection,
    TransferSection,
    WorkerSection,
)
from baton.errors import ConfigError
from baton.ids import Epoch, WorkerId
from baton.models import DEMO_MODEL_PATH
from baton.net.preemption import describe_plain_drain
from baton.protocol.announcements import require_https

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import HandoffMode
    from baton.config.sections import Role, Tls
    from baton.protocol.worker_http import Health
    from baton.worker.fence import MembershipFence


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One incarnation of one worker, as HTTP shows it.

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


class ProcessOptions(WorkerSection, frozen=True, kw_only=True):
    """The process that one worker lives in: the section `[worker]`, and others that it reads.

    `engine_options` are those of its engine alone, `at` is where it is (`config/topology.py`).
    `parent_pid` set: the worker ends when that process does. `status_fd` is where JSON lines report
    to a launcher what happens (1: standard output).

    Raises:
        ConfigError: it would announce an address that no gateway can use.
    """

    credentials: Credentials
    tls: Tls = "control"
    engine_options: Mapping[str, object] = {}
    at: str = ""
    handoff: HandoffSection = HandoffSection()
    transfer: TransferSection = TransferSection()
    store: StoreSection = StoreSection()
    preemption: PreemptionSection = PreemptionSection()
    num_traces: int = 1024
    parent_pid: int | None = None
    status_fd: int = 1

    @property
    def worker(self) -> WorkerId:
        """Its name."""
        return WorkerId(self.name)

    @property
    def model_path(self) -> Path:
        """The model's folder."""
        return Path(self.model) if self.model else DEMO_MODEL_PATH

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
