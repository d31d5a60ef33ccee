"""One life of a worker: the production agent and engine loop, and a simple API in front of them."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.auth.replay import TicketUse, UsedTickets
from baton.auth.ticket import Ticket, WorkerRef, unseal
from baton.engines.first_tokens import FirstTokens
from baton.engines.interface import (
    Colocated,
    DecodeRequest,
    EngineInfo,
    GenerationRequest,
    NewToken,
    PrefillRequest,
    RequestFailed,
    SamplingParams,
    TokensComputed,
)
from baton.engines.transformers.loop import EngineLoop
from baton.engines.transformers.scheduler import Limits, Scheduler
from baton.errors import HandoffError, TicketError
from baton.handoff.dispatcher import open_store_handoff
from baton.handoff.interface import DECLINED_STAGE, HandoffPort
from baton.handoff.kv_views import KVView, RegisteredView
from baton.handoff.options import AgentOptions
from baton.handoff.peer_transports import LinkOptions
from baton.ids import Epoch, RequestId, WorkerId
from baton.kv.pool import BlockPool
from baton.sim.handoff.agent import CheckedPort, SimAgent, SimDispatcher
from baton.sim.handoff.checker import HANDOFF_TIMEOUT_S, Checker
from baton.sim.handoff.gateway import ErrorReply, LastToken, Reply, TokenReply, WorkerRequest
from baton.sim.handoff.memory import (
    VOCABULARY,
    KilledError,
    Pages,
    SamePages,
    SimComputer,
    SimDeviceStaging,
    SimStaging,
    make_layout,
)
from baton.sim.handoff.network import SimIoBackend
from baton.sim.handoff.pool_mode import StoreHandoffDriver, make_store_access, watch
from baton.sim.handoff.timeline import SkewedClock
from baton.sim.handoff.transport import KINDS, SimTransport
from baton.telemetry.trace import RequestSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engines.interface import EngineUpdate, RequestKind
    from baton.sim.handoff.plan import WorkerPlan
    from baton.sim.handoff.world import World


class _StaleTicketError(TicketError):
    """A ticket for another life of this worker, or used before."""


class ProcessExit:
    """Whether one life has ended. `open` gives what a pidfd is in production."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def open(self) -> int:
        """A descriptor that becomes readable at its end; the caller closes it."""
        if self._fd is None:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        return os.dup(self._fd)

    def end(self) -> None:
        """It is over."""
        if self._fd is not None:
            os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """No process asks any more."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


TICK_S: Final = 0.2
MAX_WAKE_DELAY_S: Final = 0.0005
LIVENESS_TIMEOUT_S: Final = 1.0
MIN_HANDOFF_TOKENS: Final = 2
PORT: Final = 7000
_FINGERPRINT: Final = "the model"


class SimProcess:
    """A worker from its start to its end. `life` is its number in this run."""

    def __init__(self, world: World, plan: WorkerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name
        self.incarnation = world.next_incarnation()
        self.epoch = Epoch(world.rng.randbytes(16).hex())
        self.checker: Checker = world.checker
        self.checker.incarnations[self.epoch] = self.incarnation
        self.is_alive, self.is_paused, self.running_since_s = True, False, 0.0
        self.slow_factor, self.slow_until_s = 1.0, 0.0
        self.process_exit = ProcessExit()
        self.clock = SkewedClock(world.timeline, plan.offset_s, plan.rate, plan.unix_skew_s)
        self._requests: dict[RequestId, WorkerRequest] = {}
        self._deferred: list[Callable[[], None]] = []
        self._commands: list[Callable[[], None]] = []
        self._seen = UsedTickets()
        self._num_requests = 0
        self._steps_soon = self._turns_soon = self._is_turning = False
        self.store_handoff_driver = StoreHandoffDriver(self)
        self._build_agent()
        self._build_engine()
        world.timeline.after(TICK_S * world.rng.random(), self._tick)

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
            self.world.timeline.note(f"{self.name}.{self.incarnation}", what)

    def wake(self) -> None:
        """The agent has something to do."""
        if not self._steps_soon:
            self._steps_soon = True
            delay_s = MAX_WAKE_DELAY_S * self.world.rng.random()
            self.world.timeline.after(delay_s, lambda: self.when_running(self._step))

    def wake_engine(self) -> None:
        """The engine has something to do."""
        if not self._turns_soon:
            self._turns_soon = True
            delay_s = MAX_WAKE_DELAY_S * self.world.rng.random()
            self.world.timeline.after(delay_s, lambda: self.when_running(self._turn))

    def when_running(self, action: Callable[[], None]) -> None:
        """Do something now, or when the process goes on; never if it is gone."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._deferred.append(action)
        else:
            action()

    def spend_time(self, seconds: float) -> None:
        """Compute for a while: the rest of the world goes on.

        Raises:
            KilledError: it did not survive it.
        """
        timeline = self.world.timeline
        if self.slow_until_s > timeline.now_s:
            seconds *= self.slow_factor
        timeline.sleep(seconds)
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
            self.is_paused, self.running_since_s = False, self.world.timeline.now_s
            self.note("goes on")
            pending, self._deferred = self._deferred, []
            for action in pending:
                self.world.timeline.after(0.0, partial(self.when_running, action))

    def kill(self, *, silently: bool) -> None:
        """End this life, in the middle of whatever it does."""
        self.is_alive = False
        self.note("is killed")
        self.world.network.kill(self, silently=silently)
        self.world.fabric.killed(self)
        self.process_exit.end()
        for worker_request in tuple(self._requests.values()):
            if not silently:
                worker_request.break_connection()
        self._requests.clear()

    def close(self) -> None:
        """The run is over: give back what is the kernel's."""
        self.agent.loop.exporter.close()
        self.pages.close()
        self.process_exit.close()

    def receive(self, worker_request: WorkerRequest) -> None:
        """The gateway asks for something."""
        try:
            kind = self._read_kind(worker_request.sealed)
        except _StaleTicketError:
            worker_request.reply(ErrorReply("stale_ticket"))
            return
        except TicketError:
            worker_request.reply(ErrorReply("invalid_ticket"))
            return
        self._num_requests += 1
        prompt = worker_request.prompt
        if isinstance(kind, PrefillRequest):
            prompt = prompt[: kind.ticket.count_handed_over(len(prompt))]
        request = GenerationRequest(
            id=RequestId(f"{worker_request.name}~{self._num_requests}"),
            prompt_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=worker_request.num_output, temperature=0.0, seed=0),
            kind=kind,
            tenant_salt="",
            deadline=type(self.clock.now())(self.clock.now() + worker_request.left_s),
            trace=RequestSpan(
                request_id=worker_request.name,
                worker=self.name,
                epoch=self.epoch,
                role=worker_request.part,
            ),
        )
        worker_request.request = request.id
        self._requests[request.id] = worker_request
        self._order(lambda: self.loop.submit(request))

    def cancel(self, worker_request: WorkerRequest) -> None:
        """The gateway closed the connection of a call."""
        request = worker_request.request
        if request is not None and self._requests.pop(request, None) is not None:
            self._order(lambda: self.loop.cancel(request))

    def _build_agent(self) -> None:
        world, plan = self.world, self.plan
        layout = make_layout(plan.block_size)
        is_shared = world.schedule.shares_blocks and plan.staging_pool is None
        allocate = Pages.share if is_shared else Pages.allocate
        self.pages = allocate(plan.block_size, plan.num_blocks, world.rng)
        view = KVView(layout, self.pages.region, peer_mappings=self.pages.peer_mappings)
        if plan.staging_pool is not None:
            staged = Pages.allocate(plan.block_size, plan.staging_pool, world.rng)
            staging = SimStaging(self.pages, staged)
            view = KVView(
                layout,
                staged.region,
                SimDeviceStaging(staging, self) if plan.copies_late else staging,
            )
        # It has pages of its own to stage through, where it stages at all.
        pool = make_store_access(self, KVView(layout, self.pages.region))
        self.transports = tuple(
            SimTransport(KINDS[kind], self, world.fabric) for kind in world.schedule.kinds
        )
        options = AgentOptions(
            worker=WorkerId(self.name),
            epoch=self.epoch,
            fingerprint=_FINGERPRINT,
            views=(view,),
            transports=self.transports,
            credentials=world.credentials,
            clock=self.clock,
            host=self.name,
            port=PORT,
            timeout_s=HANDOFF_TIMEOUT_S,
            liveness_timeout_s=LIVENESS_TIMEOUT_S,
            preferred_op=world.schedule.op,
            lease_s=world.schedule.lease_s,
            links=LinkOptions(rule="listed"),
            spin_s=0.0,  # the clock stands still while a thread looks
            io_backend=SimIoBackend(world.network, self),
        )
        self.agent = SimAgent(options, self, self.checker)
        store = None if pool is None else open_store_handoff(options, pool)
        if store is not None and pool is not None:
            watch(store, self, pool)
        self.handoffs = SimDispatcher(self.agent, store, self, self.checker)
        self.handoffs.open_store(self.wake_engine)
        self.agent.open(self.wake_engine)

    @property
    def view(self) -> RegisteredView:
        """The only one, as the agent works with it."""
        return self.agent.loop._views[0]  # noqa: SLF001 -- the checker asks

    def _build_engine(self) -> None:
        plan = self.plan
        port: HandoffPort = CheckedPort(self.handoffs, self, self.checker)
        layout = make_layout(plan.block_size)
        limits = Limits(
            max_batch_tokens=12,
            max_num_seqs=4,
            min_handoff_tokens=MIN_HANDOFF_TOKENS,
            max_held_blocks=plan.num_blocks // 2,
            max_kept_blocks=plan.num_blocks // 4,
            max_split_tokens=24,
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
            runner=self._computer,
            pages=SamePages(self),
            scheduler=self.scheduler,
            handoff=port,
            sink=self._deliver,
            on_end=self._computer.forget,
            clock=self.clock,
            first_tokens=FirstTokens(),
        )
        self.loop.reraises = True

    def _tick(self) -> None:
        if self.is_alive:
            rng = self.world.rng.random()
            self.world.timeline.after(TICK_S * (0.75 + rng / 2), self._tick)
            if not self.is_paused:
                self.wake()
                if self.loop.compute_wait_timeout_s() is not None:
                    self.wake_engine()

    def _step(self) -> None:
        self._steps_soon = False
        self.agent.loop.step()
        self.checker.on_step(self)

    def _turn(self) -> None:
        """One turn of the engine, if it is not in the middle of one."""
        self._turns_soon = False
        if self._is_turning:
            return
        self._is_turning = True
        try:
            orders, self._commands = self._commands, []
            for order in orders:
                order()
            is_busy = self.loop.step()
        except KilledError:
            return
        self._is_turning = False
        if is_busy or self._commands:
            self.wake_engine()

    def _order(self, order: Callable[[], None]) -> None:
        self._commands.append(order)
        self.wake_engine()

    def _read_kind(self, sealed: str | None) -> RequestKind:
        """As `worker.ticket_reader.TicketReader`, which belongs to another layer.

        Raises:
            TicketError: not a ticket of this cluster.
            _StaleTicketError: a ticket for another life, or used before.
        """
        if sealed is None:
            return Colocated()
        ticket = unseal(sealed, self.world.credentials, is_from_gateway=True)
        kind = self._mine(ticket)
        if self._seen.use(ticket.issue) is not TicketUse.FIRST:
            raise _StaleTicketError("used before")
        return kind

    def _mine(self, ticket: Ticket) -> RequestKind:
        if ticket.prefill.epoch == self.epoch:
            return PrefillRequest(ticket)
        if ticket.decode.epoch == self.epoch:
            return DecodeRequest(ticket)
        raise _StaleTicketError("for another life")

    def _deliver(self, updates: Sequence[EngineUpdate]) -> None:
        for update in updates:
            worker_request = self._requests.get(update.request)
            if worker_request is None:
                continue
            message = _make_reply(update)
            if not isinstance(message, TokenReply):
                del self._requests[update.request]
            worker_request.reply(message)


def _make_reply(update: EngineUpdate) -> Reply:
    match update:
        case NewToken(finish=None):
            return TokenReply(update.token.token_id)
        case NewToken():
            return LastToken(update.token.token_id)
        case RequestFailed(error=HandoffError() as error):
            is_declined = error.stage == DECLINED_STAGE
            return ErrorReply("handoff_declined" if is_declined else "handoff_failed")
        case RequestFailed(error=error):
            return ErrorReply(str(error))
        case TokensComputed():
            raise AssertionError("no simulated gateway opens a standby request")
