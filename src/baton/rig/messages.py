"""Commands to the two processes of a pair, and their replies. msgpack."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from baton.rig.backend import Kind, Role, Traits
from baton.rig.machine import Machine
from baton.rig.pages import PAGE_BYTES, Direction, PoolPageBytes, Side, Workload

MAX_BODY_BYTES: Final = 1 << 20
MAX_SAMPLES: Final = 10_000
MAX_POOL_PAGES: Final = 1 << 18
"""8 GiB of 32 KiB."""

Metadata: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


class Build(msgspec.Struct, frozen=True, tag="build"):
    """Build this backend and its pool → `Built`."""

    kind: Kind
    name: str
    options: dict[str, object]
    role: Role
    num_pages: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_PAGES)]
    page_bytes: PoolPageBytes = PAGE_BYTES


class Built(msgspec.Struct, frozen=True, tag="built"):
    """The backend is built, on this machine."""

    traits: Traits
    metadata: Metadata
    machine: Machine


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Connect to the other process → `Done`."""

    metadata: Metadata


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Owner: serve transfers until `StopServing`. No reply."""


class StopServing(msgspec.Struct, frozen=True, tag="stop"):
    """Owner: stop → `Served`."""


class Served(msgspec.Struct, frozen=True, tag="served"):
    """CPU seconds that serving took."""

    cpu_s: float


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Set the bytes to 0 that the workload's first transfer will write → `Done`."""

    workload: Workload


class ComputeDigest(msgspec.Struct, frozen=True, tag="compute_digest"):
    """Digest one side of the workload's first transfer → `Digest`."""

    workload: Workload
    side: Side


class DigestReferenced(msgspec.Struct, frozen=True, tag="digest_referenced"):
    """Owner: digest the pages that were announced last, in place → `Digest`."""


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """XXH3-128, hexadecimal."""

    text: str


class TransferOnce(msgspec.Struct, frozen=True, tag="transfer"):
    """Driver: make the workload's first transfer → `Done`."""

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
    """Wall time of each transfer; CPU seconds of the driver for all of them, warm-up included."""

    samples_s: tuple[float, ...]
    num_moves: int
    cpu_s: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run an operation that only this backend has → `Called`."""

    name: str
    payload: Metadata = b""


class Called(msgspec.Struct, frozen=True, tag="called"):
    """What the operation returned."""

    payload: Metadata


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command succeeded."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process cannot go on; the reason, in one line."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


DigestCommand: TypeAlias = Clear | ComputeDigest | DigestReferenced
Command: TypeAlias = (
    Build | Connect | Serve | StopServing | TransferOnce | Measure | Call | DigestCommand
)
Reply: TypeAlias = Built | Served | Digest | Measured | Called | Done | Failed
