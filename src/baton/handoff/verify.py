"""How much of what arrives is compared with its sender's digests, for each kind of path.

`full`: every piece. `sampled`: a stated share of the pieces, chosen by the receiver where no sender
can foresee it, and at least one of every layer. `identity`: none; who wrote what, and where, is
still checked (ticket, epochs, grant, count), but not the bytes. docs/verification.md lists what
each level finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from baton.transfer.interface import Capabilities, Transport

Level: TypeAlias = Literal["full", "sampled", "identity"]
Path: TypeAlias = Literal["same_process", "same_host", "network"]

DEFAULT_SHARE: Final = 0.125


class VerificationSettings(Protocol):
    """Where it is configured: `[handoff]`, or the connector's options."""

    @property
    def verify_same_process(self) -> Level:
        """Within one process."""
        ...

    @property
    def verify_same_host(self) -> Level:
        """Through memory of one host."""
        ...

    @property
    def verify_network(self) -> Level:
        """Between hosts."""
        ...

    @property
    def verify_share(self) -> float:
        """Of the pieces, where they are sampled."""
        ...


@dataclass(frozen=True, slots=True)
class VerificationPolicy:
    """A level for each kind of path. `share` is that of the pieces that `sampled` looks at.

    Whatever is set here, reads of a peer's pages are verified in full (there the digest is what
    finds that the pages changed while they were read), and so is what comes out of a store.
    """

    same_process: Level = "full"
    same_host: Level = "full"
    network: Level = "full"
    share: float = DEFAULT_SHARE

    @classmethod
    def of(cls, settings: VerificationSettings) -> Self:
        """The policy that is configured."""
        return cls(
            same_process=settings.verify_same_process,
            same_host=settings.verify_same_host,
            network=settings.verify_network,
            share=settings.verify_share,
        )

    def level_on(self, path: Path) -> Level:
        """The level for one kind of path."""
        levels: dict[Path, Level] = {
            "same_process": self.same_process,
            "same_host": self.same_host,
            "network": self.network,
        }
        return levels[path]

    def level_over(self, transport: Transport) -> Level:
        """The level for what a transport brings."""
        return self.level_on(path_of(transport.capabilities))

    def no_digest_transports(self, transports: tuple[Transport, ...]) -> tuple[str, ...]:
        """Over which of these no digests are wanted."""
        return tuple(t.kind for t in transports if self.level_over(t) == "identity")


def path_of(capabilities: Capabilities) -> Path:
    """The kind of path that a transport takes."""
    if capabilities.same_process_only:
        return "same_process"
    return "same_host" if capabilities.same_host_only else "network"
