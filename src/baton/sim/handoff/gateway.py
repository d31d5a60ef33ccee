"""A gateway: as `baton.gateway.request_proxy` and `prefill_leg` place, ask, abort and try again.

    push, reference   both workers are asked at once
    pull, pool        prefill is asked, and holds or keeps; then decode; if that fails: release

Those are written for asyncio and HTTP, and belong to another layer; the decisions are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.auth.ticket import Ticket, WorkerRef, seal
from baton.clock import UnixTime
from baton.ids import TicketId
from baton.sim.handoff.deadline_checker import REQUEST_TIMEOUT_S
from baton.sim.handoff.memory import extend_chain, next_token
from baton.sim.handoff.plan import GATEWAY
from baton.sim.handoff.timeline import EPOCH_S
from baton.sim.handoff.worker_requests import (
    ConnectionLost,
    ErrorReply,
    LastToken,
    TokenReply,
    WorkerRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.sim.handoff.plan import Client
    from baton.sim.handoff.worker_requests import Reply
    from baton.sim.handoff.world import World

MAX_ATTEMPTS: Final = 2
MAX_PREFILL_FAILURES: Final = 2
_PREFILL_FIRST: Final = frozenset({"pull", "pool"})
PROBE_S: Final = 1.0
"""A worker that is asked first is looked at that often: the second time it is not well, it is
given up."""
GRACE_PERIOD_S: Final = 0.5
"""For how long the prefill leg may still answer once the client has its own."""
ABORT_RETRY_DELAYS_S: Final = (0.0, 0.05, 0.25, 1.25)


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
        self._turn = self._num_failures = 0
        self._decode = ""
        self._avoid: set[str] = set()
        self._mode = client.mode
        self._num_prefill_failures = 0
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
        decode = world.pick_worker("d", self._avoid)
        prefill = world.pick_worker("p", self._avoid) if self._may_disaggregate else None
        if decode is None:
            self._end("no worker")
            return
        self.workers.add(decode.worker)
        if prefill is None:
            self._send_decode(decode.worker, None)
            return
        self.workers.add(prefill.worker)
        sealed = self._authorise(prefill, decode)
        world.checker.leases.seen[f"mode {self._mode}"] += 1
        if self._mode in _PREFILL_FIRST:
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
        return self._num_prefill_failures < MAX_PREFILL_FAILURES

    def _send_decode(self, worker: str, sealed: str | None) -> None:
        turn, self._decode = self._turn, worker
        leg = "colocated" if sealed is None else "decode"
        self._ask(worker, leg, sealed, lambda reply: self._on_decode_reply(turn, reply))

    def _send_prefill_first(self, prefill: WorkerRef, decode: str, sealed: str) -> None:
        """Ask the prefill worker, then the other."""
        turn = self._turn
        self._is_waiting_for_prefill = self._is_kv_held = True
        world = self._world

        def on_reply(reply: Reply) -> None:
            if self.outcome is None and turn == self._turn and self._is_waiting_for_prefill:
                self._note(f"its prefill worker says {reply}")
                self._is_waiting_for_prefill = False
                self._on_prefill_first_reply(prefill, decode, sealed, reply)

        def look(num_bad: int) -> None:
            if self.outcome is None and turn == self._turn and self._is_waiting_for_prefill:
                num_bad = 0 if world.is_healthy(prefill) else num_bad + 1
                if num_bad == MAX_PREFILL_FAILURES:
                    on_reply(ConnectionLost())
                else:
                    world.timeline.after(PROBE_S, lambda: look(num_bad))

        self._ask(prefill.worker, "prefill", sealed, on_reply)
        world.timeline.after(PROBE_S, lambda: look(0))

    def _on_prefill_first_reply(
        self, prefill: WorkerRef, decode: str, sealed: str, reply: Reply
    ) -> None:
        match reply:
            case TokenReply() | LastToken():
                self._send_decode(decode, sealed)
            case ErrorReply("stale_ticket"):
                self._is_kv_held = False
                self._num_failures += 1
                if self._num_failures == MAX_ATTEMPTS:
                    self._end(f"failed: {reply}")
                    return
                self._retry()
            case ErrorReply() | ConnectionLost():
                self._num_prefill_failures += 1
                self._is_kv_held = isinstance(reply, ConnectionLost)
                if isinstance(reply, ConnectionLost):
                    self._avoid.add(prefill.worker)
                else:
                    self._mode = "push"
                self._retry()

    def _release(self) -> None:
        """What is held is wanted no more; its lease would end it, later."""
        ticket, world = self._ticket, self._world
        process = None if ticket is None else world.live.get(ticket.prefill.worker)
        if self._is_kv_held and ticket is not None and process is not None:
            self._is_kv_held = False
            notify = process.agent.abort_from_peer
            world.fabric.later(process, GATEWAY, lambda: notify(ticket.id, "no answer came"))

    def _authorise(self, prefill: WorkerRef, decode: WorkerRef) -> str:
        world = self._world
        ticket = self._ticket = Ticket(
            id=TicketId(world.rng.randbytes(16)),
            request_id=self.name,
            prefill=prefill,
            decode=decode,
            mode=self._mode,
            expires_at=UnixTime(EPOCH_S + self.deadline_s),
        )
        sealed = seal(ticket, world.key)
        world.checker.tickets[ticket.id] = ticket
        world.checker.sealed[sealed] = ticket.id
        self._note(f"{prefill.worker} → {decode.worker}, ticket {ticket.id.hex()[:6]}")
        return sealed

    def _ask(
        self, worker: str, leg: str, sealed: str | None, on_reply: Callable[[Reply], None]
    ) -> None:
        client, world = self.client, self._world
        worker_request = WorkerRequest(
            world,
            self.name,
            worker,
            leg,  # type: ignore[arg-type]
            sealed,
            client.prompt,
            1 if leg == "prefill" else client.num_output,
            self.deadline_s - world.timeline.now_s,
            on_reply,
        )
        self._requests.append(worker_request)
        worker_request.start()

    def _on_decode_reply(self, turn: int, reply: Reply) -> None:
        if self.outcome is not None or turn != self._turn:
            return
        self._note(f"its decode worker says {reply}")
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
        self._num_failures += 1
        if self.tokens or self._num_failures == MAX_ATTEMPTS:
            self._end(f"failed: {reply}")
            return
        if reply != ErrorReply("stale_ticket"):
            self._avoid.add(self._decode)
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
        self._note(f"its prefill worker says {reply}")
        match reply:
            case TokenReply() | LastToken() | ErrorReply("handoff_declined"):
                self._is_prefilling = False
            case ErrorReply("stale_ticket") if not self.tokens and not self._num_failures:
                self._num_failures += 1
                self._retry()
            case ErrorReply() | ConnectionLost():
                self._abort(str(reply))

    def _abort(self, reason: str) -> None:
        """No KV will come: tell the decode worker, until it answers."""
        ticket, world = self._ticket, self._world
        if ticket is None or not self._is_prefilling:
            return
        worker = ticket.decode.worker

        def abort() -> None:
            process = world.live.get(worker)
            if self._is_prefilling and self.outcome is None and process is not None:
                notify = process.agent.abort_from_peer
                world.fabric.later(process, GATEWAY, lambda: notify(ticket.id, reason))

        for delay_s in ABORT_RETRY_DELAYS_S:
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
