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


MAX_DUPLICATE_DELAY_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class TokenReply:
    """One token of an answer, not the last."""

    token: int


@dataclass(frozen=True, slots=True)
class LastToken:
    """The last one."""

    token: int


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error, by its code."""

    code: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection broke, or was refused."""


Reply: TypeAlias = TokenReply | LastToken | ErrorReply | ConnectionLost


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """One request to one worker. Its callback gets what comes back, until `hang_up`."""

    world: World
    name: str
    worker: str
    leg: Literal["prefill", "decode", "colocated"]
    sealed: str | None
    prompt: tuple[int, ...]
    num_output: int
    left_s: float
    on_reply: Callable[[Reply], None]
    process: SimProcess | None = None
    request: RequestId | None = None
    loses_reply: bool = False
    is_closed: bool = False
    _last_s: float = 0.0

    def start(self) -> None:
        """Send the request."""
        world = self.world
        fate = world.pop_request_fault(self.worker)
        if fate == "request":
            self._soon(GATEWAY, self.worker, lambda: self._on_reply(ConnectionLost()))
            return
        self.loses_reply = fate == "reply"
        self._soon(GATEWAY, self.worker, self._arrive)
        if fate == "duplicate":
            duplicate = WorkerRequest(
                world,
                self.name,
                self.worker,
                self.leg,
                self.sealed,
                self.prompt,
                self.num_output,
                self.left_s,
                _ignore_reply,
            )
            late_s = MAX_DUPLICATE_DELAY_S * world.rng.random()
            world.timeline.after(
                late_s, lambda: duplicate._soon(GATEWAY, self.worker, duplicate._arrive)
            )

    def reply(self, reply: Reply) -> None:
        """The worker sends something."""
        if self.loses_reply:
            self.loses_reply = False
            self.break_connection()
            self.cancel()
            return
        self._soon(self.worker, GATEWAY, lambda: self._on_reply(reply))

    def break_connection(self) -> None:
        """The connection broke at the worker's side."""
        self._soon(self.worker, GATEWAY, lambda: self._on_reply(ConnectionLost()))

    def cancel(self) -> None:
        """The gateway is not interested any more."""
        self._soon(GATEWAY, self.worker, self._cancel)

    def close(self) -> None:
        """As `hang_up`, and nothing is received from now on."""
        if not self.is_closed:
            self.is_closed = True
            self.cancel()

    def _arrive(self) -> None:
        process = self.world.live.get(self.worker)
        if process is None or not process.is_alive:
            self._soon(self.worker, GATEWAY, lambda: self._on_reply(ConnectionLost()))
            return
        self.process = process
        process.when_running(lambda: process.receive(self))

    def _cancel(self) -> None:
        process = self.process
        if process is not None:
            process.when_running(lambda: process.cancel(self))

    def _on_reply(self, reply: Reply) -> None:
        if self.is_closed:
            return
        if not isinstance(reply, TokenReply):
            self.is_closed = True
        self.on_reply(reply)

    def _soon(self, source: str, target: str, action: Callable[[], None]) -> None:
        """In order, after what is under way."""
        world = self.world
        at_s = max(self._last_s, world.network.arrival_s(source, target))
        self._last_s = at_s
        world.timeline.at(at_s, action)


def _ignore_reply(reply: Reply) -> None:
    """No client waits for the answer of a request that was sent twice."""
