"""A gateway: as `baton.gateway.request_proxy` and `prefill_request` place, ask, abort and retry.

    push, reference   both workers are asked at once
    pull, pool        prefill is asked, and holds or keeps; then decode; if that fails: release

Those are written for asyncio and HTTP; the policy is the same code, `baton.router.failover`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from baton.auth.ticket import HandoffMode, Ticket, WorkerRef, seal, write_unsigned
from baton.ids import RequestId, TicketId, WorkerId
from baton.router.failover import (
    ABORT_RETRY_DELAYS_S,
    EVERY_MODE,
    MAX_ATTEMPTS,
    PREFILL_FIRST,
    Attempt,
    Failover,
    Failure,
)
from baton.sim.handoff.checker import REQUEST_TIMEOUT_S
from baton.sim.handoff.memory import extend_chain, next_token
from baton.sim.handoff.plan import GATEWAY, Client

if TYPE_CHECKING:
    from collections.abc import Callable

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
    part: Literal["prefill", "decode", "colocated"]
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
                self.part,
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


PROBE_S: Final = 1.0
"""A worker that is asked first is looked at that often: the second time it is not well, it is
given up."""
GRACE_PERIOD_S: Final = 0.5
"""For how long the prefill request may still answer once the client has its own."""
NUM_BAD_PROBES: Final = 2


class SimRequest:
    """One client's request, from its arrival to its end. `outcome` is None before."""

    def __init__(self, world: World, client: Client, number: int) -> None:
        self.client, self.name = client, f"request-{number}"
        self.outcome: str | None = None
        self.tokens: list[int] = []
        self.ended_s = 0.0
        self.deadline_s = world.timeline.now_s + REQUEST_TIMEOUT_S
        self.workers: set[str] = set()
        self._world = world
        self._turn = 0
        self._failover = Failover()
        self._placed = Attempt(WorkerId(""))
        self._ticket: Ticket | None = None
        self._requests: list[WorkerRequest] = []
        self._is_prefilling = self._is_waiting_for_prefill = self._is_kv_held = False
        world.timeline.after(REQUEST_TIMEOUT_S, lambda: self._end("timeout"))
        if client.leaves_after_s is not None:
            world.timeline.after(client.leaves_after_s, lambda: self._end("left"))
        self._attempt()

    @property
    def expected_tokens(self) -> list[int]:
        """What any worker answers."""
        tokens = list(self.client.prompt)
        chain: list[int] = []
        for _ in range(self.client.num_output):
            extend_chain(chain, tokens)
            tokens.append(next_token(chain[-1]))
        return tokens[len(self.client.prompt) :]

    def _attempt(self) -> None:
        """Place it, and ask both workers at once, or prefill alone."""
        world = self._world
        self._turn += 1
        decode = world.pick_worker("d", self._failover.avoid)
        prefill = world.pick_worker("p", self._failover.avoid) if self._may_disaggregate else None
        if decode is None:
            self._end("no worker")
            return
        self.workers.add(decode.worker)
        self._placed = Attempt(
            decode.worker, None if prefill is None else prefill.worker, self._mode
        )
        if prefill is None:
            self._send_decode(decode.worker, None)
            return
        self.workers.add(prefill.worker)
        sealed = self._authorise(prefill, decode)
        world.checker.leases.seen[f"mode {self._mode}"] += 1
        if self._mode in PREFILL_FIRST:
            self._send_prefill_first(prefill, decode.worker, sealed)
            return
        self._send_decode(decode.worker, sealed)
        self._is_prefilling = True
        turn = self._turn
        self._ask(
            prefill.worker, "prefill", sealed, lambda reply: self._on_prefill_reply(turn, reply)
        )

    @property
    def _may_disaggregate(self) -> bool:
        return self._failover.failed_modes != EVERY_MODE

    @property
    def _mode(self) -> HandoffMode:
        """The client's mode, or the default once that failed."""
        return "push" if self.client.mode in self._failover.failed_modes else self.client.mode

    @property
    def _is_first_attempt(self) -> bool:
        return self._failover.num_left == MAX_ATTEMPTS

    def _send_decode(self, worker: str, sealed: str | None) -> None:
        turn = self._turn
        role = "colocated" if sealed is None else "decode"
        self._ask(worker, role, sealed, lambda reply: self._on_decode_reply(turn, reply))

    def _send_prefill_first(self, prefill: WorkerRef, decode: str, sealed: str) -> None:
        """Ask the prefill worker, then the other."""
        turn = self._turn
        self._is_waiting_for_prefill = self._is_kv_held = True
        world = self._world

        def on_reply(reply: Reply) -> None:
            if self.outcome is None and turn == self._turn and self._is_waiting_for_prefill:
                self._note(f"its prefill worker reports {reply}")
                self._is_waiting_for_prefill = False
                self._on_prefill_first_reply(decode, sealed, reply)

        def look(num_bad: int) -> None:
            if self.outcome is None and turn == self._turn and self._is_waiting_for_prefill:
                num_bad = 0 if world.is_healthy(prefill) else num_bad + 1
                if num_bad == NUM_BAD_PROBES:
                    on_reply(ConnectionLost())
                else:
                    world.timeline.after(PROBE_S, lambda: look(num_bad))

        self._ask(prefill.worker, "prefill", sealed, on_reply)
        world.timeline.after(PROBE_S, lambda: look(0))

    def _on_prefill_first_reply(self, decode: str, sealed: str, reply: Reply) -> None:
        match reply:
            case TokenReply() | LastToken():
                self._send_decode(decode, sealed)
            case ErrorReply("stale_ticket"):
                self._is_kv_held = False
                self._failover.record(self._placed, Failure.STALE_TICKET)
                if not self._failover.may_retry:
                    self._end(f"failed: {reply}")
                    return
                self._retry()
            case ErrorReply() | ConnectionLost():
                is_lost = self._is_kv_held = isinstance(reply, ConnectionLost)
                failure = Failure.PREFILL_FAILED if is_lost else Failure.MODE_FAILED
                self._failover.record(self._placed, failure)
                self._retry()

    def _release(self) -> None:
        """What is held is wanted no more; its lease would end it, later."""
        ticket, world = self._ticket, self._world
        process = None if ticket is None else world.live.get(ticket.prefill.worker)
        if self._is_kv_held and ticket is not None and process is not None:
            self._is_kv_held = False
            notify = process.handoffs.abort_from_peer
            world.fabric.later(process, GATEWAY, lambda: notify(ticket.id, "no answer came"))

    def _authorise(self, prefill: WorkerRef, decode: WorkerRef) -> str:
        world = self._world
        ticket = self._ticket = Ticket(
            id=TicketId(world.rng.randbytes(16)),
            request_id=self.name,
            prefill=prefill,
            decode=decode,
            mode=self._mode,
            issue=world.ticket_issuer.issue(self.deadline_s - world.timeline.now_s),
            num_prefix_tokens=self.client.num_prefix_tokens if self._mode == "push" else 0,
        )
        is_signed = ticket.id[0] & 1
        sealed = seal(ticket, world.credentials) if is_signed else write_unsigned(ticket)
        world.checker.tickets[ticket.id] = ticket
        world.checker.sealed[sealed] = ticket.id
        self._note(f"{prefill.worker} → {decode.worker}, ticket {ticket.id.hex()[:6]}")
        return sealed

    def _ask(
        self, worker: str, role: str, sealed: str | None, on_reply: Callable[[Reply], None]
    ) -> None:
        client, world = self.client, self._world
        worker_request = WorkerRequest(
            world,
            self.name,
            worker,
            role,  # type: ignore[arg-type]
            sealed,
            client.prompt,
            1 if role == "prefill" else client.num_output,
            self.deadline_s - world.timeline.now_s,
            on_reply,
        )
        self._requests.append(worker_request)
        worker_request.start()

    def _on_decode_reply(self, turn: int, reply: Reply) -> None:
        if self.outcome is not None or turn != self._turn:
            return
        self._note(f"its decode worker reports {reply}")
        match reply:
            case TokenReply(token):
                self._is_prefilling = False
                self.tokens.append(token)
            case LastToken(token):
                self._is_prefilling = False
                self.tokens.append(token)
                self._end("answered")
            case ErrorReply() | ConnectionLost():
                self._fail(reply)

    def _fail(self, reply: ErrorReply | ConnectionLost) -> None:
        """The decode worker failed: once more, if nothing was answered yet."""
        is_stale = reply == ErrorReply("stale_ticket")
        failure = Failure.STALE_TICKET if is_stale else Failure.DECODE_FAILED
        self._failover.record(self._placed, failure)
        if self.tokens or not self._failover.may_retry:
            self._end(f"failed: {reply}")
            return
        self._retry()

    def _retry(self) -> None:
        world, turn = self._world, self._turn
        self._cancel()
        delay_s = world.network.latency_s(GATEWAY, GATEWAY)

        def go_on() -> None:
            if self.outcome is None and turn == self._turn:
                world.refresh_workers()
                self._attempt()

        world.timeline.after(delay_s, go_on)

    def _on_prefill_reply(self, turn: int, reply: Reply) -> None:
        if self.outcome is not None or turn != self._turn:
            return
        self._note(f"its prefill worker reports {reply}")
        match reply:
            case TokenReply() | LastToken() | ErrorReply("handoff_declined"):
                self._is_prefilling = False
            case ErrorReply("stale_ticket") if not self.tokens and self._is_first_attempt:
                self._failover.record(self._placed, Failure.STALE_TICKET)
                self._retry()
            case ErrorReply() | ConnectionLost():
                self._abort(str(reply))

    def _abort(self, reason: str) -> None:
        """No KV will come: notify the decode worker, until it answers."""
        ticket, world = self._ticket, self._world
        if ticket is None or not self._is_prefilling:
            return
        worker = ticket.decode.worker

        def abort() -> None:
            process = world.live.get(worker)
            if self._is_prefilling and self.outcome is None and process is not None:
                notify = process.handoffs.abort_from_peer
                world.fabric.later(process, GATEWAY, lambda: notify(ticket.id, reason))

        for delay_s in accumulate(ABORT_RETRY_DELAYS_S, initial=0.0):
            world.timeline.after(delay_s, abort)

    def _end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.ended_s = self._world.timeline.now_s
            self._note(f"ends: {outcome}")
            if outcome == "answered":
                self._world.timeline.after(GRACE_PERIOD_S, self._cancel)
            else:
                self._cancel()

    def _cancel(self) -> None:
        if self.outcome != "answered":
            self._release()
        worker_requests, self._requests = self._requests, []
        for worker_request in worker_requests:
            worker_request.close()

    def _note(self, what: str) -> None:
        self._world.timeline.note(GATEWAY, f"{self.name}: {what}")
