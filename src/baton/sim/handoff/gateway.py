"""A gateway: as `baton.gateway.exchange` and `prefill_leg` place, ask, abort and try again.

    push, reference   both workers are asked at once
    pull, pool        prefill is asked, and holds or keeps; then decode; if that fails: release

Those are written for asyncio and HTTP, and belong to another layer; the decisions are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.authority.ticket import Ticket, WorkerRef, seal
from baton.clock import UnixTime
from baton.ids import TicketId
from baton.sim.handoff.calls import Call, Done, Lost, Refused, Token
from baton.sim.handoff.deadlines import REQUEST_TIMEOUT_S
from baton.sim.handoff.memory import extend_chain, next_token
from baton.sim.handoff.plan import GATEWAY
from baton.sim.handoff.timeline import EPOCH_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.sim.handoff.calls import Said
    from baton.sim.handoff.plan import Client
    from baton.sim.handoff.world import World

MAX_ATTEMPTS: Final = 2
MAX_PREFILL_FAILURES: Final = 2
_PREFILL_FIRST: Final = frozenset({"pull", "pool"})
PROBE_S: Final = 1.0
"""A worker that is asked first is looked at that often: the second time it is not well, it is
given up."""
LINGER_S: Final = 0.5
"""For how long the prefill leg may still answer once the client has its own."""
ABORT_AGAIN_AFTER_S: Final = (0.0, 0.05, 0.25, 1.25)


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
        self._calls: list[Call] = []
        self._is_prefilling = self._is_holding = self._is_held = False
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
        decode = world.place("d", self._avoid)
        prefill = world.place("p", self._avoid) if self._may_hand_over else None
        if decode is None:
            self._end("no worker")
            return
        self.workers.add(decode.worker)
        if prefill is None:
            self._ask_decode(decode.worker, None)
            return
        self.workers.add(prefill.worker)
        sealed = self._authorise(prefill, decode)
        world.checker.leases.seen[f"mode {self._mode}"] += 1
        if self._mode in _PREFILL_FIRST:
            self._hold(prefill, decode.worker, sealed)
            return
        self._ask_decode(decode.worker, sealed)
        self._is_prefilling = True
        turn = self._turn
        self._ask(prefill.worker, "prefill", sealed, lambda said: self._hear_prefill(turn, said))

    @property
    def _may_hand_over(self) -> bool:
        return self._num_prefill_failures < MAX_PREFILL_FAILURES

    def _ask_decode(self, worker: str, sealed: str | None) -> None:
        turn, self._decode = self._turn, worker
        leg = "colocated" if sealed is None else "decode"
        self._ask(worker, leg, sealed, lambda said: self._hear_decode(turn, said))

    def _hold(self, prefill: WorkerRef, decode: str, sealed: str) -> None:
        """Ask the prefill worker, then the other."""
        turn = self._turn
        self._is_holding = self._is_held = True
        world = self._world

        def hear(said: Said) -> None:
            if self.outcome is None and turn == self._turn and self._is_holding:
                self._note(f"its prefill worker says {said}")
                self._is_holding = False
                self._hear_holder(prefill, decode, sealed, said)

        def look(num_bad: int) -> None:
            if self.outcome is None and turn == self._turn and self._is_holding:
                num_bad = 0 if world.is_well(prefill) else num_bad + 1
                if num_bad == MAX_PREFILL_FAILURES:
                    hear(Lost())
                else:
                    world.timeline.after(PROBE_S, lambda: look(num_bad))

        self._ask(prefill.worker, "prefill", sealed, hear)
        world.timeline.after(PROBE_S, lambda: look(0))

    def _hear_holder(self, prefill: WorkerRef, decode: str, sealed: str, said: Said) -> None:
        match said:
            case Token() | Done():
                self._ask_decode(decode, sealed)
            case Refused("stale_ticket"):
                self._is_held = False
                self._num_failures += 1
                if self._num_failures == MAX_ATTEMPTS:
                    self._end(f"failed: {said}")
                    return
                self._again()
            case Refused() | Lost():
                self._num_prefill_failures += 1
                self._is_held = isinstance(said, Lost)
                if isinstance(said, Lost):
                    self._avoid.add(prefill.worker)
                else:
                    self._mode = "push"
                self._again()

    def _release(self) -> None:
        """What is held is wanted no more; its lease would end it, later."""
        ticket, world = self._ticket, self._world
        process = None if ticket is None else world.live.get(ticket.prefill.worker)
        if self._is_held and ticket is not None and process is not None:
            self._is_held = False
            tell = process.agent.give_up
            world.fabric.later(process, GATEWAY, lambda: tell(ticket.id, "no answer came"))

    def _authorise(self, prefill: WorkerRef, decode: WorkerRef) -> str:
        world = self._world
        ticket = self._ticket = Ticket(
            id=TicketId(world.noise.randbytes(16)),
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

    def _ask(self, worker: str, leg: str, sealed: str | None, hear: Callable[[Said], None]) -> None:
        client, world = self.client, self._world
        call = Call(
            world,
            self.name,
            worker,
            leg,  # type: ignore[arg-type]
            sealed,
            client.prompt,
            1 if leg == "prefill" else client.num_output,
            self.deadline_s - world.timeline.now_s,
            hear,
        )
        self._calls.append(call)
        call.start()

    def _hear_decode(self, turn: int, said: Said) -> None:
        if self.outcome is not None or turn != self._turn:
            return
        self._note(f"its decode worker says {said}")
        match said:
            case Token(token):
                self._is_prefilling = False
                self.tokens.append(token)
            case Done(token):
                self._is_prefilling = False
                self.tokens.append(token)
                self._end("answered")
            case Refused() | Lost():
                self._fail(said)

    def _fail(self, said: Refused | Lost) -> None:
        """The decode worker failed: once more, if nothing was answered yet."""
        self._num_failures += 1
        if self.tokens or self._num_failures == MAX_ATTEMPTS:
            self._end(f"failed: {said}")
            return
        if said != Refused("stale_ticket"):
            self._avoid.add(self._decode)
        self._again()

    def _again(self) -> None:
        world, turn = self._world, self._turn
        self._hang_up()
        delay_s = world.network.latency_s(GATEWAY, GATEWAY)

        def go_on() -> None:
            if self.outcome is None and turn == self._turn:
                world.look_again()
                self._attempt()

        world.timeline.after(delay_s, go_on)

    def _hear_prefill(self, turn: int, said: Said) -> None:
        if self.outcome is not None or turn != self._turn:
            return
        self._note(f"its prefill worker says {said}")
        match said:
            case Token() | Done() | Refused("handoff_declined"):
                self._is_prefilling = False
            case Refused("stale_ticket") if not self.tokens and not self._num_failures:
                self._num_failures += 1
                self._again()
            case Refused() | Lost():
                self._abort(str(said))

    def _abort(self, reason: str) -> None:
        """No KV will come: tell the decode worker, until it answers."""
        ticket, world = self._ticket, self._world
        if ticket is None or not self._is_prefilling:
            return
        worker = ticket.decode.worker

        def abort() -> None:
            process = world.live.get(worker)
            if self._is_prefilling and self.outcome is None and process is not None:
                tell = process.agent.give_up
                world.fabric.later(process, GATEWAY, lambda: tell(ticket.id, reason))

        for delay_s in ABORT_AGAIN_AFTER_S:
            world.timeline.after(delay_s, abort)

    def _end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.ended_s = self._world.timeline.now_s
            self._note(f"ends: {outcome}")
            if outcome == "answered":
                self._world.timeline.after(LINGER_S, self._hang_up)
            else:
                self._hang_up()

    def _hang_up(self) -> None:
        if self.outcome != "answered":
            self._release()
        calls, self._calls = self._calls, []
        for call in calls:
            call.close()

    def _note(self, what: str) -> None:
        self._world.timeline.note(GATEWAY, f"{self.name}: {what}")
