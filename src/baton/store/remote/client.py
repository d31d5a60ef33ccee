"""What a server's library has to offer to `RemoteTier`: values by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from baton.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.store.interface import Body


class RequestRefusedError(StoreError):
    """The server answered, and refused this request (no permission, an error)."""


class EntryRefusedError(RequestRefusedError):
    """The server refused to give this value, and may give others (archived, another's key)."""


@dataclass(frozen=True, slots=True)
class RemoteValue:
    """One key as a listing shows it. `used_at`: UNIX time of the last use, or of the write."""

    key: str
    num_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class ServerReport:
    """A server at one moment. Sizes are of all that it keeps; 0: it has no limit, or hides it.

    `eviction`: what the server does when it is full; None where that is not its to decide.
    `takes_entries`: False where it is only read.
    """

    product: str
    version: str = ""
    used_bytes: int = 0
    capacity_bytes: int = 0
    eviction: str | None = None
    takes_entries: bool = True


class RemoteClient(Protocol):
    """One server. Blocks, with the time-outs of its library; from any thread.

    Every method but `disconnect` raises StoreError: the server cannot be reached, does not answer
    or is only a copy; its subclass RequestRefusedError: it answers, and refuses.
    """

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which keys are there, in one round trip or a few at once.

        Keys beyond the first missing one may be reported as missing, too.
        """
        ...

    def read(self, key: str, max_bytes: int) -> Body | None:
        """A value; None if it is not there; one that is longer than `max_bytes` comes cut off."""
        ...

    def use(self, key: str, max_bytes: int) -> Body | None:
        """The same, and count it as the value's last use, where the server keeps account of it."""
        ...

    def put(self, key: str, value: bytes) -> bool:
        """Keep a value unless the key exists; whether it was kept.

        Raises:
            StoreFullError: the server has no room.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    def list_values(self, max_values: int) -> list[RemoteValue]:
        """The values of this cluster, at most so many. Looks at every key of the server."""
        ...

    def report(self) -> ServerReport:
        """Ask the server about itself: shows that it is well, too."""
        ...

    def disconnect(self) -> None:
        """Close all connections: calls in progress fail, later ones connect anew."""
        ...


@runtime_checkable
class ReportsServer(Protocol):
    """What the factory of a tier on a server can do besides (`baton doctor`)."""

    def report(self) -> ServerReport:
        """Ask the server about itself, on a connection of its own.

        Raises:
            ConfigError: it refuses these credentials.
            StoreError: it cannot be reached.
        """
        ...
