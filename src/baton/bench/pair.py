"""Two processes and one contender between them: set up, verified, measured."""

from __future__ import annotations

import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeVar

from baton.bench.orders import (
    Answer,
    Begin,
    Begun,
    Digest,
    Done,
    Failed,
    Fingerprint,
    Look,
    Measure,
    Measured,
    Meet,
    MoveOnce,
    Order,
    Rest,
    Rested,
    Serve,
    Wipe,
)
from baton.bench.workload import PAGE_BYTES
from baton.errors import PeerLostError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.contender import Role, Traits
    from baton.bench.ends import End, Ends
    from baton.bench.machine import Machine
    from baton.bench.plan import Effort, Entrant
    from baton.bench.workload import Direction, Workload

ANSWER_TIMEOUT_S: Final = 60.0
"""For loading a library and filling a pool; each transfer has a shorter one of its own."""

A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one row's measurement in one round took: each sample; CPU for all moves."""

    samples_s: tuple[float, ...]
    num_moves: int
    driver_cpu_s: float
    owner_cpu_s: float


class WrongBytesError(TransferError):
    """Other bytes arrived than were sent."""


class Pair:
    """A contender that is set up in one or two processes. Close it, whatever happened.

    Raises:
        TransferError: it does not work between these two; the reason is the library's.
    """

    def __init__(
        self, entrant: Entrant, num_pages: int, ends: Ends, page_bytes: int = PAGE_BYTES
    ) -> None:
        self._entrant, self._ends = entrant, ends
        self._num_pages, self._page_bytes = num_pages, page_bytes
        self._driver: End | None = None
        self._owner: End | None = None
        self.machines: dict[Role, Machine] = {}
        self.traits: Traits

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        ends = [end for end in (self._driver, self._owner) if end is not None]
        self._driver = self._owner = None
        for end in ends:
            end.channel.close()  # both at once, then wait for either
        for end in ends:
            end.close()

    def verify(self, workload: Workload, direction: Direction) -> None:
        """Make the workload's first move and compare digests: of pages lent, as they are seen.

        Raises:
            WrongBytesError: they differ.
            TransferError: the move failed.
        """
        if direction == "lend":
            self._verify_lent(workload)
            return
        source, target = self._sides(direction)
        self._ask(target, Wipe(workload), Done)
        self._begin_serving()
        self._ask(self._driver, MoveOnce(workload, direction), Done)
        self._end_serving()
        sent = self._ask(source, Fingerprint(workload, "src"), Digest)
        if sent != self._ask(target, Fingerprint(workload, "dst"), Digest):
            raise WrongBytesError(f"{workload.name}, {direction}: other bytes arrived")

    def measure(self, workload: Workload, direction: Direction, effort: Effort) -> Taken:
        """Repeat the workload.

        Raises:
            TransferError: a transfer failed, or a process did.
        """
        order = Measure(
            workload, direction, effort.budget_s, effort.min_samples, effort.max_samples
        )
        self._begin_serving()
        measured = self._ask(self._driver, order, Measured)
        owner_cpu_s = self._end_serving()
        return Taken(measured.samples_s, measured.num_moves, measured.cpu_s, owner_cpu_s)

    def _verify_lent(self, workload: Workload) -> None:
        self._begin_serving()
        self._ask(self._driver, MoveOnce(workload, "lend"), Done)
        self._end_serving()
        lent = self._ask(self._driver, Fingerprint(workload, "src"), Digest)
        if lent != self._ask(self._owner, Look(), Digest):
            raise WrongBytesError(f"{workload.name}, lend: other bytes are seen")

    def _open(self) -> None:
        is_contained = self._entrant.processes == "two contained"
        met = None
        if self._entrant.processes != "one":
            self._owner = self._ends.open("owner", 0 if is_contained else None)
            met = self._begin(self._owner, "owner")
        network_of = self._owner.pid if is_contained and self._owner is not None else None
        self._driver = self._ends.open("driver", network_of)
        begun = self._begin(self._driver, "driver")
        self.traits = begun.traits
        if met is not None:
            self._ask(self._owner, Meet(begun.introduction), Done)
            self._begin_serving()
            self._ask(self._driver, Meet(met.introduction), Done)
            self._end_serving()

    def _begin(self, end: End, role: Role) -> Begun:
        entrant = self._entrant
        options = dict(entrant.options)
        order = Begin(entrant.kind, entrant.name, options, role, self._num_pages, self._page_bytes)
        begun = self._ask(end, order, Begun)
        self.machines[role] = begun.machine
        return begun

    def _sides(self, direction: Direction) -> tuple[End | None, End | None]:
        """Who has the bytes, and who gets them."""
        owner = self._owner or self._driver
        return (self._driver, owner) if direction == "push" else (owner, self._driver)

    def _begin_serving(self) -> None:
        if self._owner is not None:
            self._owner.channel.say(Serve())

    def _end_serving(self) -> float:
        return 0.0 if self._owner is None else self._ask(self._owner, Rest(), Rested).cpu_s

    def _ask(self, end: End | None, order: Order, kind: type[A]) -> A:
        if end is None:
            raise TransferError("this pair was closed")
        return ask(end, [each for each in (self._driver, self._owner) if each], order, kind)


def ask(end: End, ends: Sequence[End], order: Order, kind: type[A]) -> A:
    """Say an order to one of the ends; its answer, or what any of them has to complain about.

    Raises:
        TransferError: it failed, or its process did.
    """
    try:
        end.channel.say(order)
        answer = _await(end, ends).channel.hear(ANSWER_TIMEOUT_S)
    except PeerLostError as exc:
        said = end.explain()
        raise PeerLostError(f"{exc} ({said})" if said else str(exc)) from exc
    if isinstance(answer, Failed):
        raise TransferError(answer.reason)
    if not isinstance(answer, kind):
        raise TransferError(f"a process answered {type(answer).__name__}")
    return answer


def _await(end: End, ends: Sequence[End]) -> End:
    """Who speaks first: the one that was asked, unless another one failed meanwhile."""
    by_fd = {each.channel.fd: each for each in ends}
    ready = select.select(list(by_fd), [], [], ANSWER_TIMEOUT_S)[0]
    if end.channel.fd in ready or not ready:
        return end
    return by_fd[ready[0]]
