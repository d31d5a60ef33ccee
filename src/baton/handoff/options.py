"""What a handoff agent is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from baton.encodings.interface import RAW
from baton.errors import ConfigError
from baton.handoff.io_backend import OS_BACKEND, IoBackend
from baton.handoff.peer_transports import LinkOptions
from baton.handoff.verify import VerificationPolicy
from baton.transfer.adaptive_wait import MAX_SPIN_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import HandoffMode
    from baton.clock import Clock, Instant
    from baton.handoff.kv_views import KVView
    from baton.handoff.messages import TransferOp
    from baton.ids import Epoch, WorkerId
    from baton.transfer.interface import Transport


class WriteLease(Protocol):
    """Until when this worker may begin to write to others.

    Another thread sets it and the agent's reads it: a worker that was stopped past its lease writes
    nothing when it goes on, whichever of its threads runs first.
    """

    @property
    def until(self) -> Instant:
        """As it is now; it may be extended."""
        ...


def check_device_memory(
    tiers: Sequence[str], encoding: str, error_budget: float | None = None
) -> None:
    """Refuse what reads KV from the host's memory, where it is in a GPU's.

    Raises:
        ConfigError: names the setting.
    """
    for name, is_set in (
        ("store.tiers", bool(tiers)),
        ("handoff.encoding", encoding != RAW),
        ("handoff.error_budget", error_budget is not None),
    ):
        if is_set:
            raise ConfigError(
                f"{name} needs KV in the host's memory, and transfer.transports keeps it in the "
                "GPU's: remove the one, or choose another transport"
            )


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Who this agent is and what it works with; `views` and `transports` in order of preference.

    `preferred_op` is who moves the bytes where this worker receives, if the transport can do both.
    `traits` are readable properties that explain why two workers cannot exchange KV (engine,
    version, dtype …): at most 32, names of 64 characters; peers see 256 characters of a value.
    `lease_s` is how long
    a computed prompt is held for a decode worker that does not renew it. A prompt's computed layers
    are sent together once they exceed `layer_batch_bytes`, and the rest with its end. Without
    `write_lease` this worker may always write to others.
    """

    worker: WorkerId
    epoch: Epoch
    fingerprint: str
    views: tuple[KVView, ...]
    transports: tuple[Transport, ...]
    credentials: Credentials
    clock: Clock
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 60.0
    liveness_timeout_s: float = 3.0
    lease_s: float = 10.0
    layer_batch_bytes: int = 0
    preferred_op: TransferOp = "WRITE"
    traits: Mapping[str, str] = field(default_factory=dict)
    links: LinkOptions = field(default_factory=LinkOptions)
    io_backend: IoBackend = OS_BACKEND
    verification: VerificationPolicy = field(default_factory=VerificationPolicy)
    spin_s: float = MAX_SPIN_S
    write_lease: WriteLease | None = None

    @property
    def modes(self) -> tuple[HandoffMode, ...]:
        """The ways of handing over that this agent takes part in, on either side."""
        is_open = any(view.peer_mappings is not None for view in self.views)
        if is_open and any(each.capabilities.views for each in self.transports):
            return "push", "pull", "reference"
        return "push", "pull"

    def __post_init__(self) -> None:
        """Check the KV views.

        Raises:
            ConfigError: there is none, or they are not of one model.
        """
        if len({view.layout.num_layers for view in self.views}) != 1:
            raise ConfigError("a worker needs a KV view, and all its views have the same layers")
