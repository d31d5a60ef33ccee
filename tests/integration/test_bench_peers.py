"""A peer's arm from start to stop: real processes, the real proxy, servers without an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from baton.bench.architectures.folder import ResultFolder
from baton.bench.architectures.peers.plan import PeerPlan, PeerServer
from baton.bench.architectures.peers.servers import open_peer_fleet
from baton.bench.architectures.plan import Configuration, Trial
from baton.bench.architectures.servers import InterruptedBenchError, ServerContext
from baton.bench.architectures.trial import Bench, run_trial
from baton.bench.architectures.usage import EnergyMeter
from baton.bench.files import open_manifest
from baton.bench.load.stream import EventParser
from baton.clock import MachineClock
from baton.engines.vllm.options import VllmOptions
from baton.launch.slots import GATEWAY, ChildFailedError
from tests.unit.bench.architectures import cells as plans

STUB = Path(__file__).with_name("stub_vllm_peer.py")
FIRST_CORE = min(os.sched_getaffinity(0))
TIMEOUT_S = 150


class StubbedPlan(PeerPlan):
    """A peer's plan, with stubs in the place of vLLM."""

    def server_command(self, port):
        return (sys.executable, str(STUB), str(port))


class BrokenPlan(PeerPlan):
    """Its servers end at once."""

    def server_command(self, port):
        return (sys.executable, "-c", "raise SystemExit('no such model')")


def make_plan(kind=StubbedPlan):
    servers = tuple(PeerServer(f"{role}-0", role, (FIRST_CORE,)) for role in ("prefill", "decode"))
    return kind("nixl", Path("/model"), "m", VllmOptions(), "cpu", servers)


@asynccontextmanager
async def running(tmp_path, plan, interrupt=None):
    surroundings = ServerContext(dict(os.environ), MachineClock(), interrupt or asyncio.Event())
    async with (
        asyncio.timeout(TIMEOUT_S),
        open_peer_fleet(plan, surroundings, tmp_path / "log") as fleet,
        aiohttp.ClientSession() as session,
    ):
        yield fleet, session


async def ask(session, fleet, prompt):
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "stream": True}
    async with session.post(f"{fleet.url}/v1/completions", json=body) as response:
        return response.status, await response.read()


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()


def test_prefill_then_decode_and_the_servers_tell_that_kv_moved(tmp_path):
    async def scenario():
        async with running(tmp_path, make_plan()) as (fleet, session):
            pids = fleet.processes
            assert set(pids) == {"prefill-0", "decode-0", GATEWAY}
            # They had moved themselves to the last core, as NIXL does.
            for name in ("prefill-0", "decode-0"):
                assert os.sched_getaffinity(pids[name]) == {FIRST_CORE}
            await fleet.transfer_check.begin(session)
            for _ in range(2):
                status, raw = await ask(session, fleet, [1, 2, 3, 4])
                assert status == 200
                assert len(list(EventParser().feed(raw))) == 4  # three tokens and [DONE]
            reported = await fleet.transfer_check.verify(session, (), 2)
            assert reported.proof.is_proved
            assert (reported.proof.num_received_tokens, reported.proof.num_bytes) == (8, 512)
            status, raw = await ask(session, fleet, [13])
            assert (status, b"thirteen" in raw) == (400, True)  # prefill's own words
            assert not fleet.is_over
        return fleet, pids

    fleet, pids = asyncio.run(scenario())
    assert not any(is_alive(pid) for pid in pids.values())
    log = (tmp_path / "log").read_text("utf-8")
    assert "[prefill-0] stub is here" in log
    assert "[decode-0] stub is here" in log
    if (os.cpu_count() or 1) > FIRST_CORE + 1:  # there is another core that they could go to
        assert len([note for note in fleet.notes if "pinned to its share again" in note]) == 2


def test_a_server_that_dies_ends_the_turn_and_leaves_nothing(tmp_path):
    pids = {}

    async def scenario():
        async with running(tmp_path, make_plan()) as (fleet, session):
            pids.update(fleet.processes)
            os.kill(pids["decode-0"], signal.SIGKILL)
            await fleet.until_ended()
            assert fleet.is_over
            status, _ = await ask(session, fleet, [1, 2])
            assert status == 502

    with pytest.raises(ChildFailedError, match=r"decode-0 ended \(killed by SIGKILL\)"):
        asyncio.run(scenario())
    assert not any(is_alive(pid) for pid in pids.values())


class Killer:
    """A benchmark's progress that kills the servers as the first requests go out."""

    def begin(self, doing, tally=None):
        if "first requests" in doing:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()
            for pid in children:
                if STUB.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)


def test_first_requests_that_fail_since_a_server_died_say_so(tmp_path):
    """Not that the server fails at these requests, which is all that its client met."""

    async def scenario():
        interrupt, clock = asyncio.Event(), MachineClock()
        plan = plans.make_plan("1")
        manifest = open_manifest(("bench",), clock)
        bench = Bench(
            plan, ResultFolder(tmp_path), clock, manifest, EnergyMeter(), Killer(), interrupt
        )
        turn = Trial(1, Configuration("peer:nixl-1P1D", 0, 1, 1), plan.levels)
        surroundings = ServerContext(dict(os.environ), clock, interrupt)
        (tmp_path / "logs").mkdir()
        async with asyncio.timeout(TIMEOUT_S):
            return await run_trial(bench, turn, make_plan(), surroundings)

    outcome = asyncio.run(scenario())
    assert "ended (killed by SIGKILL)" in outcome.failure


def test_a_server_that_does_not_start_is_reported_in_its_own_words(tmp_path):
    async def scenario():
        async with running(tmp_path, make_plan(BrokenPlan)):
            pass

    with pytest.raises(ChildFailedError, match=r"(?s)ended while starting.*no such model"):
        asyncio.run(scenario())


def test_somebody_who_wants_the_end_need_not_wait_for_the_start(tmp_path):
    async def scenario():
        wanted = asyncio.Event()
        wanted.set()
        async with running(tmp_path, make_plan(), wanted):
            pass

    with pytest.raises(InterruptedBenchError):
        asyncio.run(scenario())
