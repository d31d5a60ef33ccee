"""What the conductor tells the two processes of a pair, and what they answer. msgpack."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from baton.bench.contender import Kind, Role, Traits
from baton.bench.machine import Machine
from baton.bench.pool import Side
from baton.bench.workload import Direction, Workload

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


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It was done."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot go on; why, in one line."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


Order: TypeAlias = Begin | Meet | Serve | Rest | Wipe | Fingerprint | Look | MoveOnce | Measure
Answer: TypeAlias = Begun | Rested | Digest | Measured | Done | Failed
