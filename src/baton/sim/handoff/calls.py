"""Requests of the gateway to workers, and what comes back: one connection for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from baton.sim.handoff.plan import GATEWAY

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.ids import RequestId
    from baton.sim.handoff.process import SimProcess
    from baton.sim.handoff.world import World


LATEST_TWIN_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer, not the last."""

    token: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last one."""

    token: int


@dataclass(frozen=True, slots=True)
class Refused:
    """An error, by its code."""

    code: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection broke, or was refused."""


Said: TypeAlias = Token | Done | Refused | Lost


@dataclass(slots=True, eq=False)
class Call:
    """One request to one worker. `hear` is told what comes back, until `hang_up`."""

    world: World
    name: str
    worker: str
    leg: Literal["prefill", "decode", "colocated"]
    sealed: str | None
    prompt: tuple[int, ...]
    num_output: int
    left_s: float
    hear: Callable[[Said], None]
    process: SimProcess | None = None
    request: RequestId | None = None
    loses_answer: bool = False
    is_closed: bool = False
    _last_s: float = 0.0

    def start(self) -> None:
        """Send the request."""
        world = self.world
        fate = world.take_call_fate(self.worker)
        if fate == "request":
            self._soon(GATEWAY, self.worker, lambda: self._hear(Lost()))
            return
        self.loses_answer = fate == "answer"
        self._soon(GATEWAY, self.worker, self._arrive)
        if fate == "twice":
            twin = Call(
                world,
                self.name,
                self.worker,
                self.leg,
                self.sealed,
                self.prompt,
                self.num_output,
                self.left_s,
                _ignore,
            )
            late_s = LATEST_TWIN_S * world.noise.random()
            world.timeline.after(late_s, lambda: twin._soon(GATEWAY, self.worker, twin._arrive))

    def answer(self, said: Said) -> None:
        """The worker says something."""
        if self.loses_answer:
            self.loses_answer = False
            self.break_off()
            self.hang_up()
            return
        self._soon(self.worker, GATEWAY, lambda: self._hear(said))

    def break_off(self) -> None:
        """The connection broke at the worker's side."""
        self._soon(self.worker, GATEWAY, lambda: self._hear(Lost()))

    def hang_up(self) -> None:
        """The gateway is not interested any more."""
        self._soon(GATEWAY, self.worker, self._hang_up)

    def close(self) -> None:
        """As `hang_up`, and nothing is heard from now on."""
        if not self.is_closed:
            self.is_closed = True
            self.hang_up()

    def _arrive(self) -> None:
        process = self.world.live.get(self.worker)
        if process is None or not process.is_alive:
            self._soon(self.worker, GATEWAY, lambda: self._hear(Lost()))
            return
        self.process = process
        process.when_awake(lambda: process.receive(self))

    def _hang_up(self) -> None:
        process = self.process
        if process is not None:
            process.when_awake(lambda: process.hang_up(self))

    def _hear(self, said: Said) -> None:
        if self.is_closed:
            return
        if not isinstance(said, Token):
            self.is_closed = True
        self.hear(said)

    def _soon(self, source: str, target: str, action: Callable[[], None]) -> None:
        """In order, after what is under way."""
        world = self.world
        at_s = max(self._last_s, world.network.arrival_s(source, target))
        self._last_s = at_s
        world.timeline.at(at_s, action)


def _ignore(said: Said) -> None:
    """Nobody waits for the answer of a request that was sent twice."""
