"""Clients before simulated workers: what the tests of divisions of labour share."""

from __future__ import annotations

from itertools import count, takewhile

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.fleet import WorkerView
from baton.sim.router.costs import SimulatedCosts
from baton.sim.router.sessions import Session, TokenRun, Turn
from baton.sim.router.simulation import Simulation

COSTS = SimulatedCosts(handoff_token_s=0.0, block_size=512, kv_tokens=1 << 20)


def view(name, role=Role.BOTH):
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    return WorkerView(ref, role, "demo", "f", frozenset({"tcp"}), available=True)


def replicas(num):
    return [view(f"w{n}") for n in range(num)]


def split(num_prefill, num_decode):
    return [
        *(view(f"p{n}", Role.PREFILL) for n in range(num_prefill)),
        *(view(f"d{n}", Role.DECODE) for n in range(num_decode)),
    ]


class World:
    """Clients that ask for prompts without a common beginning, one after another."""

    def __init__(
        self, policy, views, num_tokens, num_answer_tokens, costs=COSTS, seed=0, itl_s=None
    ):
        self.simulation = Simulation([policy], views, costs, seed, itl_s=itl_s)
        self.itl_s = itl_s
        self.views, self.num_clients = views, 0
        self.num_tokens, self.num_answer_tokens = num_tokens, num_answer_tokens
        self.asked = self.sessions()

    def sessions(self):
        for number in count():
            run = TokenRun(str(number), self.num_tokens)
            yield Session((Turn((run,), self.num_answer_tokens),))

    def run(self, num_clients, until_s):
        """Until this time, with so many clients from now on: more than before, or as many."""
        self.simulation.add_clients(self.asked, num_clients - self.num_clients)
        self.num_clients = num_clients
        self.simulation.run(until_s)

    def burst(self, num_clients, for_s, pause_s):
        """So many clients for so long, and then none."""
        until_s = self.simulation.now + for_s
        asked = takewhile(lambda _: self.simulation.now < until_s, self.asked)
        self.simulation.add_clients(asked, num_clients)
        self.simulation.run(until_s + pause_s)

    def goodput(self, since_s, ttft_s, tpot_s):
        """Requests a second within all limits, of those that ended since then."""
        outcomes = [each for each in self.simulation.outcomes if each.ended_at > since_s]
        num_good = sum(each.is_good(ttft_s, tpot_s, self.itl_s) for each in outcomes)
        return num_good / (self.simulation.now - since_s)
