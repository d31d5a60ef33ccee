"""The arms: ways to use the same workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Peer: TypeAlias = Literal["nixl", "vllm-router"]
"""nixl: vLLM's NixlConnector behind a simple proxy; vllm-router: replicated vLLM behind it."""

PEERS: Final[tuple[Peer, ...]] = ("nixl", "vllm-router")
SINGLE: Final = "single"
REPLICATED: Final = "replicated"
MOST_WORKERS: Final = 64


@dataclass(frozen=True, slots=True)
class Arm:
    """One way. Workers that do `both` parts, or some that prefill and others that decode.

    `peer`: whose servers they are; None: Baton's.
    """

    name: str
    num_both: int
    num_prefill: int = 0
    num_decode: int = 0
    peer: Peer | None = None

    @property
    def num_workers(self) -> int:
        """Workers that it uses."""
        return self.num_both + self.num_prefill + self.num_decode

    @property
    def is_disaggregated(self) -> bool:
        """Whether KV has to move."""
        return self.num_prefill > 0

    @property
    def is_compared(self) -> bool:
        """Whether it is held against Baton's replication."""
        return self.is_disaggregated or self.peer is not None

    @property
    def folder(self) -> str:
        """Its name, as that of a file."""
        return self.name.replace(":", "-")


def choose_arms(
    num_workers: int, wanted: Sequence[str] = (), peers: Sequence[Peer] = ()
) -> tuple[Arm, ...]:
    """All arms of so many workers and these peers' too, or those that are wanted by name.

    Raises:
        ConfigError: no such arm, or too few workers to compare anything.
    """
    if not 2 <= num_workers <= MOST_WORKERS:  # noqa: PLR2004 - one prefill, one decode
        raise ConfigError(f"--workers {num_workers}: 2 to {MOST_WORKERS} can be compared")
    arms = (Arm(SINGLE, 1), Arm(REPLICATED, num_workers), *_splits(num_workers))
    others = tuple(arm for peer in PEERS for arm in _peer_arms(num_workers, peer))
    known = {arm.name.lower(): arm for arm in (*arms, *others)}
    for name in wanted:
        if name.lower() not in known:
            names = ", ".join(arm.name for arm in known.values())
            raise ConfigError(f"--arm {name}: with {num_workers} workers there are {names}")
    chosen = {name.lower() for name in wanted} or {arm.name.lower() for arm in arms}
    return tuple(
        arm for name, arm in known.items() if name in chosen or (arm.peer and arm.peer in peers)
    )


def _splits(num_workers: int) -> Iterator[Arm]:
    for num in range(1, num_workers):
        yield Arm(f"{num}P{num_workers - num}D", 0, num, num_workers - num)


def _peer_arms(num_workers: int, peer: Peer) -> Iterator[Arm]:
    match peer:
        case "nixl":
            for split in _splits(num_workers):
                yield replace(split, name=f"peer:nixl-{split.name}", peer=peer)
        case "vllm-router":
            yield Arm("peer:vllm-router", num_workers, peer=peer)
        case other:
            assert_never(other)
