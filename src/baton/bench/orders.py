"""What the conductor tells the two processes of a pair, and what they answer. msgpack."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from baton.auth.ticket import WorkerRef
from baton.bench.contender import Kind, Role, Traits
from baton.bench.machine import Machine
from baton.bench.pool import Side
from baton.bench.workload import PAGE_BYTES, Direction, PoolPageBytes, Workload

MAX_BODY_BYTES: Final = 1 << 20
MAX_SAMPLES: Final = 10_000
MAX_POOL_PAGES: Final = 1 << 18
"""8 GiB of 32 KiB."""

Introduction: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Build this contender and its pool → `Begun`."""

    kind: Kind
    name: str
    options: dict[str, object]
    role: Role
    num_pages: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_PAGES)]
    page_bytes: PoolPageBytes = PAGE_BYTES


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """It was built. `machine` is where."""

    traits: Traits
    introduction: Introduction
    machine: Machine


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Connect to the other process → `Done`."""

    introduction: Introduction


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Owner: help with transfers until `Rest`. No answer."""


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """Owner: no more → `Rested`."""


class Rested(msgspec.Struct, frozen=True, tag="rested"):
    """CPU seconds that serving took."""

    cpu_s: float


class Wipe(msgspec.Struct, frozen=True, tag="wipe"):
    """Set to 0 where the workload's first move will write → `Done`."""

    workload: Workload


class Fingerprint(msgspec.Struct, frozen=True, tag="fingerprint"):
    """Digest one side of the workload's first move → `Digest`."""

    workload: Workload
    side: Side


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """XXH3-128, hexadecimal."""

    text: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Owner: digest the pages that were lent last, where they lie → `Digest`."""


class MoveOnce(msgspec.Struct, frozen=True, tag="move"):
    """Driver: make the workload's first move → `Done`."""

    workload: Workload
    direction: Direction


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Driver: repeat for `budget_s`, `min_samples` to `max_samples` times → `Measured`."""

    workload: Workload
    direction: Direction
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=60)]
    min_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    max_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Each transfer's wall time; CPU seconds of the driver for all moves, the warm-up too."""

    samples_s: tuple[float, ...]
    num_moves: int
    cpu_s: float


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Start a handoff agent with these transports (kind → options) → `Joined`."""

    transports: dict[str, dict[str, object]]
    role: Role


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """It listens. `absent`: a transport that does not work here → why."""

    ref: WorkerRef
    absent: dict[str, str]
    machine: Machine


class Dial(msgspec.Struct, frozen=True, tag="dial"):
    """Meet another agent → `Done`. The driver reads from whom it dials, and writes to who dials."""

    ref: WorkerRef


class Survey(msgspec.Struct, frozen=True, tag="survey"):
    """Wait until the agent has measured these links, or for `timeout_s` → `Surveyed`."""

    direction: Direction
    kinds: tuple[str, ...]
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)]


class MeasuredLink(msgspec.Struct, frozen=True):
    """A link's model, as the survey of two workers that met left it."""

    transport: str
    latency_s: float
    descriptor_s: float
    byte_s: float
    num_probes: int


class Surveyed(msgspec.Struct, frozen=True, tag="surveyed"):
    """What was measured; a link that is not here kept its prior."""

    links: tuple[MeasuredLink, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It was done."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot go on; why, in one line."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


AgentOrder: TypeAlias = Join | Dial | Survey
LookOrder: TypeAlias = Wipe | Fingerprint | Look
Order: TypeAlias = Begin | Meet | Serve | Rest | MoveOnce | Measure | LookOrder | AgentOrder
Answer: TypeAlias = Begun | Rested | Digest | Measured | Joined | Surveyed | Done | Failed
