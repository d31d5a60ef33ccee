"""Workers that prefill in chunks and decode in steps, in virtual time, behind a policy.

What is simulated is one loop per worker, as both engines have it: a chunk of the oldest prompt,
then a step of all answers. `FleetLoad` is kept as a gateway keeps it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from baton.router.fleet import Fleet
from baton.router.load import FleetLoad
from baton.router.placement import Placement, PlacementRequest

if TYPE_CHECKING:
    from baton.router.fleet import WorkerView
    from baton.router.load import RunningRequest
    from baton.router.placement import PlacementPolicy

CHUNK_S = 0.07
HANDOFF_S = 0.01
TOKEN_S = 2.2e-4
STEP_S = (0.010, 0.0004)


@dataclass(eq=False)
class Job:
    """One request. Times are virtual seconds."""

    placement: Placement
    running: RunningRequest
    began_at: float
    left_s: float
    num_left: int
    num_streamed: int = 0
    first_at: float = 0.0


@dataclass(eq=False)
class Worker:
    """What it has, and whether its loop is running."""

    view: WorkerView
    prompts: list[Job] = field(default_factory=list)
    answers: list[Job] = field(default_factory=list)
    is_running: bool = False
    was_chunk: bool = False


@dataclass
class World:
    """Closed loops of `num_clients` over workers of both roles, or of other roles."""

    policy: PlacementPolicy
    views: list[WorkerView]
    num_tokens: int
    num_answer_tokens: int

    def __post_init__(self) -> None:
        self.load, self.now = FleetLoad(), 0.0
        self.fleet = Fleet.of(self.views)
        self.workers = {view.id: Worker(view) for view in self.views}
        self.events: list[tuple[float, int, object]] = []
        self.order = count()
        self.ended: list[tuple[float, float, float]] = []  # (at, ttft, tpot)

    def run(self, num_clients: int, until_s: float) -> None:
        """Until this time; the clients that are under way before count."""
        num_more = num_clients - sum(len(w.prompts) + len(w.answers) for w in self.workers.values())
        for client in range(num_more):
            self.at(self.now + 0.01 * client, self.begin)
        while self.events and self.events[0][0] < until_s:
            self.now, _, action = heapq.heappop(self.events)
            action()
        self.now = until_s

    def at(self, at: float, action: object) -> None:
        heapq.heappush(self.events, (at, next(self.order), action))

    def begin(self) -> None:
        request = PlacementRequest("demo", num_prompt_tokens=self.num_tokens, at=self.now)
        placement = self.policy.place(self.fleet, request, self.load)
        assert isinstance(placement, Placement)
        running = self.load.begin(placement, self.num_tokens, self.now)
        job = Job(placement, running, self.now, self.num_tokens * TOKEN_S, self.num_answer_tokens)
        worker = self.workers[(placement.prefill or placement.decode).id]
        worker.prompts.append(job)
        self.wake(worker)

    def wake(self, worker: Worker) -> None:
        if worker.is_running or not (worker.prompts or worker.answers):
            return
        worker.is_running = True
        if worker.prompts and not (worker.was_chunk and worker.answers):
            takes_s = min(CHUNK_S, worker.prompts[0].left_s)
            worker.was_chunk = True
            self.at(self.now + takes_s, lambda: self.end_chunk(worker, takes_s))
        else:
            fixed, each = STEP_S
            worker.was_chunk = False
            streams = list(worker.answers)
            takes_s = fixed + each * len(streams)
            self.at(self.now + takes_s, lambda: self.end_step(worker, streams))

    def end_chunk(self, worker: Worker, took_s: float) -> None:
        job = worker.prompts[0]
        job.left_s -= took_s
        if job.left_s < 1e-9:
            worker.prompts.pop(0)
            job.running.prefilled(self.now)
            if job.placement.prefill is None:
                self.first_token(job)
            else:
                self.at(self.now + HANDOFF_S, lambda: self.first_token(job))
        worker.is_running = False
        self.wake(worker)

    def first_token(self, job: Job) -> None:
        job.first_at, job.num_streamed = self.now, 1
        job.running.first_token(self.now)
        worker = self.workers[job.placement.decode.id]
        worker.answers.append(job)
        self.wake(worker)

    def end_step(self, worker: Worker, streams: list[Job]) -> None:
        for job in streams:
            job.num_streamed += 1
            if job.num_streamed == self.num_answer_tokens:
                worker.answers.remove(job)
                job.running.end(self.now, job.num_streamed)
                tpot_s = (self.now - job.first_at) / (job.num_streamed - 1)
                self.ended.append((self.now, job.first_at - job.began_at, tpot_s))
                self.at(self.now, self.begin)
        worker.is_running = False
        self.wake(worker)

    def goodput(self, since_s: float, ttft_s: float, tpot_s: float) -> float:
        """Requests a second within both limits, of those that ended since then."""
        good = [each for each in self.ended if each[0] > since_s]
        good = [each for each in good if each[1] <= ttft_s and each[2] <= tpot_s]
        return len(good) / (self.now - since_s)
