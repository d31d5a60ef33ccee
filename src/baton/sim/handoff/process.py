"""One life of a worker: the production agent and engine loop, and a simple API in front of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.authority.seen import SeenTickets, TicketUse
from baton.authority.ticket import WorkerRef, unseal
from baton.engines.first_tokens import FirstTokens
from baton.engines.interface import (
    Colocated,
    DecodeLeg,
    EngineInfo,
    GenerationRequest,
    NewToken,
    PrefillLeg,
    RequestFailed,
    SamplingParams,
)
from baton.engines.transformers.loop import EngineLoop
from baton.engines.transformers.scheduler import Limits, Scheduler
from baton.errors import HandoffError, TicketError
from baton.handoff.agent import AgentOptions
from baton.handoff.faces import Face
from baton.handoff.interface import DECLINED_STAGE
from baton.handoff.link_options import LinkOptions
from baton.ids import Epoch, RequestId, WorkerId
from baton.kv.pool import BlockPool
from baton.sim.handoff.agent import SimAgent, WatchedPort
from baton.sim.handoff.calls import Done, Refused, Said, Token
from baton.sim.handoff.computing import KilledError, SamePages, SimComputer
from baton.sim.handoff.deadlines import HANDOFF_TIMEOUT_S
from baton.sim.handoff.memory import VOCABULARY, Pages, SimStaging, make_layout
from baton.sim.handoff.mortality import Mortality
from baton.sim.handoff.network import SimSurroundings
from baton.sim.handoff.pooling import PoolDriver, make_pool, watch
from baton.sim.handoff.timeline import SkewedClock
from baton.sim.handoff.transport import KINDS, SimTransport
from baton.telemetry.trace import LegTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.authority.ticket import Ticket
    from baton.engines.interface import EngineUpdate, Leg
    from baton.handoff.footprint import ServedFace
    from baton.handoff.interface import HandoffPort
    from baton.sim.handoff.calls import Call
    from baton.sim.handoff.checker import Checker
    from baton.sim.handoff.plan import WorkerPlan
    from baton.sim.handoff.world import World

TICK_S: Final = 0.2
LONGEST_WAKE_S: Final = 0.0005
LIVENESS_TIMEOUT_S: Final = 1.0
MIN_HANDOFF_TOKENS: Final = 2
PORT: Final = 7000
_FINGERPRINT: Final = "the model"


class SimProcess:
    """A worker from its start to its end. `life` is its number in this run."""

    def __init__(self, world: World, plan: WorkerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name
        self.life = world.count_life()
        self.epoch = Epoch(world.noise.randbytes(16).hex())
        self.checker: Checker = world.checker
        self.checker.lives[self.epoch] = self.life
        self.is_alive, self.is_paused, self.awake_since_s = True, False, 0.0
        self.slow_factor, self.slow_until_s = 1.0, 0.0
        self.mortality = Mortality()
        self.clock = SkewedClock(world.timeline, plan.offset_s, plan.rate, plan.unix_skew_s)
        self._calls: dict[RequestId, Call] = {}
        self._owed: list[Callable[[], None]] = []
        self._inbox: list[Callable[[], None]] = []
        self._seen = SeenTickets()
        self._num_calls = 0
        self._steps_soon = self._turns_soon = self._is_turning = False
        self.pool_driver = PoolDriver(self)
        self._build_agent()
        self._build_engine()
        world.timeline.after(TICK_S * world.noise.random(), self._tick)

    @property
    def ref(self) -> WorkerRef:
        """Who this life is."""
        return WorkerRef(WorkerId(self.name), self.epoch, self.agent.address)

    @property
    def can_answer(self) -> bool:
        """Whether it runs."""
        return self.is_alive and not self.is_paused

    def note(self, what: str) -> None:
        """Write a line of the log."""
        if self.world.timeline.log is not None:
            self.world.timeline.note(f"{self.name}.{self.life}", what)

    def wake(self) -> None:
        """The agent has something to do."""
        if not self._steps_soon:
            self._steps_soon = True
            delay_s = LONGEST_WAKE_S * self.world.noise.random()
            self.world.timeline.after(delay_s, lambda: self.when_awake(self._step))

    def wake_engine(self) -> None:
        """The engine has something to do."""
        if not self._turns_soon:
            self._turns_soon = True
            delay_s = LONGEST_WAKE_S * self.world.noise.random()
            self.world.timeline.after(delay_s, lambda: self.when_awake(self._turn))

    def when_awake(self, action: Callable[[], None]) -> None:
        """Do something now, or when the process goes on; never if it is gone."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._owed.append(action)
        else:
            action()

    def take_time(self, seconds: float) -> None:
        """Compute for a while: the rest of the world goes on.

        Raises:
            KilledError: it did not survive it.
        """
        timeline = self.world.timeline
        if self.slow_until_s > timeline.now_s:
            seconds *= self.slow_factor
        timeline.nap(seconds)
        while self.is_paused and self.is_alive:
            timeline.step()
        if not self.is_alive:
            raise KilledError

    def pause(self) -> None:
        """Stand still: messages pile up, deadlines pass."""
        self.is_paused = True
        self.note("is stopped")

    def resume(self) -> None:
        """Go on, with all that piled up."""
        if self.is_paused:
            self.is_paused, self.awake_since_s = False, self.world.timeline.now_s
            self.note("goes on")
            owed, self._owed = self._owed, []
            for action in owed:
                self.world.timeline.after(0.0, partial(self.when_awake, action))

    def kill(self, *, silently: bool) -> None:
        """End this life, in the middle of whatever it does."""
        self.is_alive = False
        self.note("is killed")
        self.world.network.kill(self, silently=silently)
        self.world.fabric.killed(self)
        self.mortality.end()
        for call in tuple(self._calls.values()):
            if not silently:
                call.break_off()
        self._calls.clear()

    def close(self) -> None:
        """The run is over: give back what is the kernel's."""
        self.agent._lending.close()  # noqa: SLF001 -- `stop` is for agents with a thread
        self.pages.close()
        self.mortality.close()

    def receive(self, call: Call) -> None:
        """The gateway asks for something."""
        try:
            leg = self._read_leg(call.sealed)
        except TicketError as exc:
            is_stale = "another life" in str(exc) or "before" in str(exc)
            call.answer(Refused("stale_ticket" if is_stale else "invalid_ticket"))
            return
        self._num_calls += 1
        request = GenerationRequest(
            id=RequestId(f"{call.name}~{self._num_calls}"),
            prompt_ids=np.array(call.prompt, np.int32),
            sampling=SamplingParams(max_tokens=call.num_output, temperature=0.0, seed=0),
            leg=leg,
            tenant_salt="",
            deadline=type(self.clock.now())(self.clock.now() + call.left_s),
            trace=LegTrace(request_id=call.name, worker=self.name, epoch=self.epoch, leg=call.leg),
        )
        call.request = request.id
        self._calls[request.id] = call
        self._order(lambda: self.loop.submit(request))

    def hang_up(self, call: Call) -> None:
        """The gateway closed the connection of a call."""
        request = call.request
        if request is not None and self._calls.pop(request, None) is not None:
            self._order(lambda: self.loop.cancel(request))

    def _build_agent(self) -> None:
        world, plan = self.world, self.plan
        layout = make_layout(plan.block_size)
        is_lent = world.schedule.lends and plan.staging_pages is None
        allocate = Pages.share if is_lent else Pages.allocate
        self.pages = allocate(plan.block_size, plan.num_blocks, world.noise)
        face = Face(layout, self.pages.region, annexes=self.pages.annexes)
        if plan.staging_pages is not None:
            staged = Pages.allocate(plan.block_size, plan.staging_pages, world.noise)
            face = Face(layout, staged.region, SimStaging(self.pages, staged))
        # It has pages of its own to stage through, where it stages at all.
        pool = make_pool(self, Face(layout, self.pages.region))
        self.transports = tuple(
            SimTransport(KINDS[kind], self, world.fabric) for kind in world.schedule.kinds
        )
        options = AgentOptions(
            worker=WorkerId(self.name),
            epoch=self.epoch,
            fingerprint=_FINGERPRINT,
            faces=(face,),
            transports=self.transports,
            key=world.key,
            clock=self.clock,
            host=self.name,
            port=PORT,
            timeout_s=HANDOFF_TIMEOUT_S,
            liveness_timeout_s=LIVENESS_TIMEOUT_S,
            mover=world.schedule.mover,
            lease_s=world.schedule.lease_s,
            links=LinkOptions(rule="listed"),
            pool=pool,
            awake_s=0.0,  # the clock stands still while a thread looks
            surroundings=SimSurroundings(world.network, self),
        )
        self.agent = SimAgent(options, self, self.checker)
        if pool is not None and self.agent.pool_desk is not None:
            watch(self.agent.pool_desk, self, pool)
        self.agent.open(self.wake_engine)

    @property
    def face(self) -> ServedFace:
        """The only one, as the agent works with it."""
        return self.agent._faces[0]  # noqa: SLF001 -- the checker asks

    def _build_engine(self) -> None:
        plan = self.plan
        port: HandoffPort = WatchedPort(self.agent, self, self.checker)
        layout = make_layout(plan.block_size)
        limits = Limits(
            max_batch_tokens=12,
            max_num_seqs=4,
            min_handoff_tokens=MIN_HANDOFF_TOKENS,
            max_held_blocks=plan.num_blocks // 2,
        )
        self.scheduler = Scheduler(BlockPool(plan.num_blocks), limits, layout.layers)
        self._computer = SimComputer(self, port)
        self.loop = EngineLoop(
            info=EngineInfo(
                engine="sim",
                model_path="",
                fingerprint=_FINGERPRINT,
                layout=layout,
                num_blocks=plan.num_blocks,
                max_context_tokens=1 << 20,
                vocab_size=VOCABULARY,
                eos_token_ids=(),
            ),
            computer=self._computer,
            pages=SamePages(self),
            scheduler=self.scheduler,
            handoff=port,
            sink=self._deliver,
            on_end=self._computer.forget,
            clock=self.clock,
            first_tokens=FirstTokens(),
        )

    def _tick(self) -> None:
        if self.is_alive:
            noise = self.world.noise.random()
            self.world.timeline.after(TICK_S * (0.75 + noise / 2), self._tick)
            if not self.is_paused:
                self.wake()
                if self.loop.compute_patience_s() is not None:
                    self.wake_engine()

    def _step(self) -> None:
        self._steps_soon = False
        self.agent.step()
        self.checker.stepped(self)

    def _turn(self) -> None:
        """One turn of the engine, if it is not in the middle of one."""
        self._turns_soon = False
        if self._is_turning:
            return
        self._is_turning = True
        try:
            orders, self._inbox = self._inbox, []
            for order in orders:
                order()
            is_busy = self.loop.turn()
        except KilledError:
            return
        self._is_turning = False
        if is_busy or self._inbox:
            self.wake_engine()

    def _order(self, order: Callable[[], None]) -> None:
        self._inbox.append(order)
        self.wake_engine()

    def _read_leg(self, sealed: str | None) -> Leg:
        """As `worker.legs.LegReader`, which belongs to another layer.

        Raises:
            TicketError: not a ticket for this life, or used before.
        """
        if sealed is None:
            return Colocated()
        now = self.clock.unix_now()
        ticket = unseal(sealed, self.world.key, now)
        leg = self._mine(ticket)
        if self._seen.use(ticket, now) is not TicketUse.FIRST:
            raise TicketError("used before")
        return leg

    def _mine(self, ticket: Ticket) -> Leg:
        if ticket.prefill.epoch == self.epoch:
            return PrefillLeg(ticket)
        if ticket.decode.epoch == self.epoch:
            return DecodeLeg(ticket)
        raise TicketError("for another life")

    def _deliver(self, updates: Sequence[EngineUpdate]) -> None:
        for update in updates:
            call = self._calls.get(update.request)
            if call is None:
                continue
            message = _say(update)
            if not isinstance(message, Token):
                del self._calls[update.request]
            call.answer(message)


def _say(update: EngineUpdate) -> Said:
    match update:
        case NewToken(finish=None):
            return Token(update.token.token_id)
        case NewToken():
            return Done(update.token.token_id)
        case RequestFailed(error=HandoffError() as error):
            is_declined = error.stage == DECLINED_STAGE
            return Refused("handoff_declined" if is_declined else "handoff_failed")
        case RequestFailed(error=error):
            return Refused(str(error))
