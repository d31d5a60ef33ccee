"""What a seed gives: the cluster, its clients, and what befalls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from baton.auth.ticket import HandoffMode
    from baton.handoff.messages import TransferOp
    from baton.sim.handoff.fabric import CorruptionKind
    from baton.sim.handoff.store import EntryFaultKind

GATEWAY: Final = "gateway"
Host: TypeAlias = str
"""A worker's name, or `GATEWAY`."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker. `staging_pool` is None where peers reach the engine's own pages.

    `copies_late`: a GPU copies between those and the staged ones, and the worker goes on meanwhile.
    """

    name: Host
    block_size: int
    num_blocks: int
    staging_pool: int | None
    offset_s: float
    rate: float
    unix_skew_s: float
    copies_late: bool = False

    @property
    def is_prefill(self) -> bool:
        """Which of the two halves it plays."""
        return self.name.startswith("p")


@dataclass(frozen=True, slots=True)
class Client:
    """One request; the client leaves before the end where `leaves_after_s` is set.

    `mode` is what the policy names for it. Above 0, and in mode push, KV of no more than
    `num_prefix_tokens` of the prompt is handed over.
    """

    arrives_s: float
    prompt: tuple[int, ...]
    num_output: int
    leaves_after_s: float | None
    mode: HandoffMode = "push"
    num_prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker dies. `silently`: its host does, so that no peer is notified."""

    at_s: float
    worker: Host
    silently: bool
    back_after_s: float | None


@dataclass(frozen=True, slots=True)
class Pause:
    """A worker stands still, and goes on. `replaced`: meanwhile another life took its place."""

    at_s: float
    worker: Host
    for_s: float
    replaced: bool


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker computes, or its host's network carries, more slowly."""

    at_s: float
    worker: Host
    for_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class CutConnections:
    """All connections between two workers break, in the middle of a message perhaps."""

    at_s: float
    one: Host
    another: Host
    silently: bool
    num_kept: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing gets from one host to another; `both_ways` neither back."""

    at_s: float
    one: Host
    another: Host
    for_s: float
    both_ways: bool


@dataclass(frozen=True, slots=True)
class CorruptTransfers:
    """Pages of the next transfers do not arrive as they left."""

    at_s: float
    effects: tuple[CorruptionKind, ...]


@dataclass(frozen=True, slots=True)
class CorruptEntries:
    """The next entries of the store are refused, or do not stay what they were."""

    at_s: float
    effects: tuple[EntryFaultKind, ...]


@dataclass(frozen=True, slots=True)
class BreakTransport:
    """A transport of one worker loses its connections, and makes no new ones for a while."""

    at_s: float
    worker: Host
    kind: str
    for_s: float


@dataclass(frozen=True, slots=True)
class FailTransfers:
    """The next transfers over a transport fail in the middle."""

    at_s: float
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class DropRequest:
    """The gateway's next call to a worker breaks: before it arrives, or before its answer."""

    at_s: float
    worker: Host
    part: Literal["request", "reply"]


@dataclass(frozen=True, slots=True)
class DuplicateRequest:
    """The gateway's next call to a worker arrives twice."""

    at_s: float
    worker: Host


@dataclass(frozen=True, slots=True)
class ReplayMessages:
    """An incarnation of a worker sends to its peers what another one sent before."""

    at_s: float
    worker: Host
    count: int


Fault: TypeAlias = (
    Crash
    | Pause
    | Slow
    | CutConnections
    | Partition
    | CorruptTransfers
    | CorruptEntries
    | BreakTransport
    | FailTransfers
    | DropRequest
    | DuplicateRequest
    | ReplayMessages
)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The store of a cluster: tokens of a full entry, and bytes in all."""

    block_size: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that a run depends on, with the code. `seed` is of what the plan leaves open.

    `lease_s` is every prefill worker's.
    """

    seed: int
    workers: tuple[WorkerPlan, ...]
    kinds: tuple[str, ...]
    op: TransferOp
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]
    lease_s: float = 10.0
    store: StorePlan | None = None

    @property
    def shares_blocks(self) -> bool:
        """Whether workers share memory, so that blocks can be exported."""
        return any(client.mode == "reference" for client in self.clients)
