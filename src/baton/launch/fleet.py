"""What an operator may ask of a running fleet, on one machine, Ray or Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, TypeAlias, cast

import msgspec
from msgspec import Meta

from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

BACKENDS: Final[Registry[object]] = Registry("baton.fleets")
DEFAULT_FLEET: Final = "default"

MemberRole: TypeAlias = Literal["gateway", "prefill", "decode", "both"]
MemberState: TypeAlias = Literal["starting", "ready", "draining", "ended", "failed"]
COUNTED: Final = frozenset[MemberState]({"starting", "ready"})
"""States of the workers that `scale` counts: the others serve no requests, and are replaced."""
MAX_COUNT: Final = 10_000
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class FleetMember(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a fleet. `host` is a host's name or address; `reason` explains its state."""

    name: str
    role: MemberRole
    state: MemberState
    host: str
    url: str | None = None
    pid: int | None = None
    num_restarts: Count = 0
    up_s: float | None = None
    labels: dict[str, str] = {}
    reason: str = ""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet at one moment."""

    fleet: str
    backend: str
    version: str
    members: tuple[FleetMember, ...]


class FleetSize(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers of each role are wanted; None leaves a role as it is."""

    prefill: Count | None = None
    decode: Count | None = None
    both: Count | None = None


class FleetControl(Protocol):
    """A running fleet, as its operator controls it. Every method has a deadline of its own.

    Raises (all methods):
        FleetError: the fleet cannot be reached, or refuses; the message has cause and remedy.
    """

    async def status(self) -> FleetStatus:
        """All processes and their states."""
        ...

    def scale(self, size: FleetSize) -> AsyncIterator[str]:
        """Start or drain workers until each role has so many that serve or start (`COUNTED`).

        Yields lines of progress. Failed workers are removed once others serve in their place. On
        Kubernetes they count, since their StatefulSet restarts them.
        """
        ...

    def drain(self, worker: str) -> AsyncIterator[str]:
        """Take a worker out: it finishes what it has, ends, and is not started again.

        On Kubernetes another one starts in its place: there the number of workers is `scale`'s.
        """
        ...

    def upgrade(self) -> AsyncIterator[str]:
        """Replace each process by a new one, one after the other, without a failed request."""
        ...

    def down(self) -> AsyncIterator[str]:
        """Drain and end everything."""
        ...

    def logs(self, member: str, num_lines: int, *, follow: bool) -> AsyncIterator[str]:
        """The last lines of a process and, with `follow`, those that come, without end."""
        ...


class FleetBackend(Protocol):
    """Where fleets run: what an entry point of the group `baton.fleets` names."""

    def connect(self, fleet: str) -> AbstractAsyncContextManager[FleetControl]:
        """Control of the fleet of that name, for as long as the block runs.

        Raises:
            FleetError: it does not run, or cannot be reached.
        """
        ...


def find_backend(name: str) -> FleetBackend:
    """The backend of that name.

    Raises:
        UnknownPluginError: no installed distribution declares it.
    """
    return cast("FleetBackend", BACKENDS.load(name))
