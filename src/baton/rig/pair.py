"""Two processes and one backend between them: connect, verify, measure."""

from __future__ import annotations

import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeVar

from baton.errors import PeerLostError, TransferError
from baton.rig.backend import (
    Build,
    Built,
    Call,
    Called,
    Clear,
    Command,
    ComputeDigest,
    Connect,
    Digest,
    DigestReferenced,
    Done,
    Failed,
    Measure,
    Measured,
    Reply,
    Serve,
    Served,
    StopServing,
    TransferOnce,
)
from baton.rig.pages import PAGE_BYTES, Direction, Side, UnsupportedError, Workload

if TYPE_CHECKING:
    from baton.rig.backend import BackendSpec, Role, Traits
    from baton.rig.machine import Machine
    from baton.rig.nodes import Node, Nodes

REPLY_TIMEOUT_S: Final = 60.0
"""For loading a library and filling a pool; each transfer has a shorter timeout of its own."""

R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, slots=True)
class SampleBudget:
    """How long one workload is repeated: `budget_s`, but `min_samples` to `max_samples` times.

    Fewer on a slow link: see `MOST_MEASURING_S` of `node.py`.
    """

    budget_s: float
    min_samples: int
    max_samples: int


@dataclass(frozen=True, slots=True)
class Timings:
    """One measurement: the time of each transfer, and the CPU time of both sides for all."""

    samples_s: tuple[float, ...]
    num_moves: int
    driver_cpu_s: float
    owner_cpu_s: float


class WrongBytesError(TransferError):
    """The bytes that arrived are not those that were sent."""


class NodePair:
    """A connected backend in one or two processes; close it in any case.

    Raises:
        TransferError: it does not work between these two; the reason is the library's.
    """

    def __init__(
        self,
        spec: BackendSpec,
        num_pages: int,
        nodes: Nodes,
        page_bytes: int = PAGE_BYTES,
        *,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self._spec, self._nodes, self._reply_timeout_s = spec, nodes, reply_timeout_s
        self._num_pages, self._page_bytes = num_pages, page_bytes
        self._open_nodes: dict[Role, Node] = {}
        self.machines: dict[Role, Machine] = {}
        self.metadata: dict[Role, bytes] = {}
        self.traits: Traits

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        nodes, self._open_nodes = list(self._open_nodes.values()), {}
        for node in nodes:
            node.channel.close()  # both at once, then wait for either
        for node in nodes:
            node.close()

    def verify(self, workload: Workload, direction: Direction, *, also_rest: bool = False) -> None:
        """Make the workload's first transfer and compare digests of both sides.

        By reference, the owner digests the pages in place. `also_rest`: the target's other bytes
        must not have changed.

        Raises:
            WrongBytesError: they differ.
            TransferError: the transfer failed.
        """
        if direction == "reference":
            self._verify_referenced(workload)
            return
        # One process has both pools.
        target: Role = "owner" if "owner" in self._open_nodes else "driver"
        source: Role = "driver"
        if direction == "pull":
            source, target = target, source
        self._ask(target, Clear(workload), Done)
        rest = self._digest(target, workload, "rest") if also_rest else None
        self._begin_serving()
        self._ask("driver", TransferOnce(workload, direction), Done)
        self._end_serving()
        if self._digest(source, workload, "src") != self._digest(target, workload, "dst"):
            raise WrongBytesError(f"{workload.name}, {direction}: other bytes arrived")
        if rest is not None and rest != self._digest(target, workload, "rest"):
            raise WrongBytesError(f"{workload.name}, {direction}: other pages changed")

    def measure(self, workload: Workload, direction: Direction, budget: SampleBudget) -> Timings:
        """Repeat the workload.

        Raises:
            TransferError: a transfer or a process failed.
        """
        command = Measure(
            workload, direction, budget.budget_s, budget.min_samples, budget.max_samples
        )
        self._begin_serving()
        measured = self._ask("driver", command, Measured)
        owner_cpu_s = self._end_serving()
        return Timings(measured.samples_s, measured.num_moves, measured.cpu_s, owner_cpu_s)

    def call(
        self, role: Role, name: str, payload: bytes = b"", *, peer_serves: bool = False
    ) -> bytes:
        """Run an operation that only this backend has, on one side; see `Backend.call`.

        `peer_serves`: the other side makes progress meanwhile.
        """
        peer: Role = "driver" if role == "owner" else "owner"
        if not peer_serves:
            return self._ask(role, Call(name, payload), Called).payload
        self._open_nodes[peer].channel.send(Serve())
        payload = self._ask(role, Call(name, payload), Called).payload
        self._ask(peer, StopServing(), Served)
        return payload

    def _digest(self, role: Role, workload: Workload, side: Side) -> Digest:
        return self._ask(role, ComputeDigest(workload, side), Digest)

    def _verify_referenced(self, workload: Workload) -> None:
        self._begin_serving()
        self._ask("driver", TransferOnce(workload, "reference"), Done)
        self._end_serving()
        sent = self._digest("driver", workload, "src")
        if sent != self._ask("owner", DigestReferenced(), Digest):
            raise WrongBytesError(f"{workload.name}, by reference: other bytes are seen")

    def _open(self) -> None:
        is_contained = self._spec.processes == "two contained"
        owner: Node | None = None
        if self._spec.processes != "one":
            owner = self._start("owner", 0 if is_contained else None)
        self._start("driver", owner.pid if is_contained and owner is not None else None)
        if owner is not None:
            self._ask("owner", Connect(self.metadata["driver"]), Done)
            self._begin_serving()
            self._ask("driver", Connect(self.metadata["owner"]), Done)
            self._end_serving()

    def _start(self, role: Role, network_of: int | None) -> Node:
        node = self._open_nodes[role] = self._nodes.open(role, network_of)
        spec = self._spec
        command = Build(
            spec.kind, spec.name, dict(spec.options), role, self._num_pages, self._page_bytes
        )
        built = self._ask(role, command, Built)
        self.machines[role], self.metadata[role] = built.machine, built.metadata
        self.traits = built.traits
        return node

    def _begin_serving(self) -> None:
        if "owner" in self._open_nodes:
            self._open_nodes["owner"].channel.send(Serve())

    def _end_serving(self) -> float:
        if "owner" not in self._open_nodes:
            return 0.0
        return self._ask("owner", StopServing(), Served).cpu_s

    def _ask(self, role: Role, command: Command, kind: type[R]) -> R:
        """Send a command to one side; its reply, or the error that either side reports.

        Raises:
            TransferError: it failed, or its process did.
        """
        node = self._open_nodes.get(role)
        if node is None:
            raise TransferError("this pair was closed")
        try:
            node.channel.send(command)
            node = self._first_ready(node)
            reply = node.channel.receive(self._reply_timeout_s)
        except PeerLostError as exc:
            error = node.last_error()
            raise PeerLostError(f"{exc} ({error})" if error else str(exc)) from exc
        if isinstance(reply, Failed):
            raise (UnsupportedError if reply.is_unsupported else TransferError)(reply.reason)
        if not isinstance(reply, kind):
            raise TransferError(f"a process answered {type(reply).__name__}")
        return reply

    def _first_ready(self, node: Node) -> Node:
        """The node that was asked, unless the other one fails meanwhile."""
        by_fd = {each.channel.fd: each for each in self._open_nodes.values()}
        ready = select.select(list(by_fd), [], [], self._reply_timeout_s)[0]
        return node if node.channel.fd in ready or not ready else by_fd[ready[0]]
