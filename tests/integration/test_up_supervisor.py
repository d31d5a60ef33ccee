"""The launcher over real processes that load no model."""

import asyncio
import errno
import json
import os
import socket
import subprocess
from contextlib import asynccontextmanager

import pytest

from baton.clock import MachineClock
from baton.errors import ConfigError
from baton.launch import slots as slots_module
from baton.launch import supervisor as supervisor_module
from baton.launch.restarts import RestartPolicy
from baton.launch.slots import ChildFailedError
from baton.launch.supervisor import Ending
from tests.integration.stub_launch import in_event_loop, launch, lives, run_until_ready


@in_event_loop
async def test_a_launch_starts_serves_and_drains():
    under_test = launch("worker")
    pids = {}

    async def then():
        pids.update(under_test.pids())
        assert all(lives(pid) for pid in pids.values())
        assert os.getpgid(pids["w-0"]) == pids["w-0"]
        under_test.supervisor.request_stop()

    assert await run_until_ready(under_test, then) is Ending.DRAINED
    (service,) = under_test.services
    assert service.model == "stub"
    assert not any(lives(pid) for pid in pids.values())
    lines = under_test.display.child_lines
    assert lines.index(("gateway", "gateway ends")) < lines.index(("w-0", "worker ends"))
    assert under_test.display.said[-1] == "stopped: w-0 (exit code 0), gateway (exit code 0)"
    assert ("w-0", "gateway") in under_test.display.waited_for


@in_event_loop
async def test_a_worker_that_fails_at_start_stops_everything():
    under_test = launch("worker", "broken")
    with pytest.raises(ChildFailedError) as failure:
        await under_test.run()
    message = str(failure.value)
    assert message.startswith("w-1 ended while starting (exit code 3). Its last lines:\n")
    assert "    No module named 'steam'\n" in message
    assert "likely cause: a dependency is missing" in message
    assert not any(lives(pid) for pid in under_test.pids().values())
    assert not under_test.services


@in_event_loop
async def test_a_gateway_that_uses_no_worker_is_a_failure(monkeypatch):
    monkeypatch.setattr(supervisor_module, "SERVING_TIMEOUT_S", 0.5)
    under_test = launch("worker", gateway="blind")
    with pytest.raises(ChildFailedError, match="the gateway does not use all 1 workers"):
        await under_test.run()
    assert not any(lives(pid) for pid in under_test.pids().values())


@in_event_loop
async def test_a_worker_that_dies_comes_back_on_its_port(tmp_path):
    die = tmp_path / "die"
    under_test = launch("mortal", environment={"STUB_DIE_FILE": str(die)})

    async def then():
        before, ports = under_test.pids(), under_test.supervisor.slots["w-0"].ports
        die.touch()
        await under_test.until_said("w-0 is back")
        assert under_test.pids()["w-0"] != before["w-0"]
        assert under_test.pids()["gateway"] == before["gateway"]
        assert f"w-0 is back at http://127.0.0.1:{ports.http}" in under_test.display.said
        under_test.supervisor.request_stop()

    assert await run_until_ready(under_test, then) is Ending.DRAINED
    assert "w-0 ended: exit code 7; restart in 0.01 s (1 of at most 2)" in under_test.display.said


@asynccontextmanager
async def killing(die):
    """Whoever watches the file `die` ends again and again, as long as the block runs."""

    async def keep_killing():
        while True:
            die.touch()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(keep_killing())
    try:
        yield
    finally:
        task.cancel()
        die.unlink(missing_ok=True)


@in_event_loop
async def test_the_others_serve_on_while_a_worker_ends_too_often_and_it_comes_back(tmp_path):
    die = tmp_path / "die"
    under_test = launch(
        *("mortal", "worker"),
        members=tmp_path / "members.json",
        environment={"STUB_DIE_FILE": str(die)},
    )

    async def then():
        before, slot = under_test.pids(), under_test.supervisor.slots["w-0"]
        async with killing(die):
            await under_test.until_said("w-0 ended too often (exit code 7): ")
        after = under_test.pids()
        assert all(after[name] == before[name] for name in ("w-1", "gateway"))
        async with asyncio.timeout(60):
            while (member := slot.describe(MachineClock().now(), "here")).state != "ready":
                await asyncio.sleep(0.01)
        assert member.reason == "", "it serves again"
        assert slot.num_restarts >= 3, "more than were allowed in succession"
        under_test.supervisor.request_stop()

    assert await run_until_ready(under_test, then) is Ending.DRAINED


@in_event_loop
async def test_a_launch_that_ends_without_a_worker_that_failed_says_so(tmp_path):
    die = tmp_path / "die"
    under_test = launch(
        *("mortal", "worker"),
        members=tmp_path / "members.json",
        environment={"STUB_DIE_FILE": str(die)},
        restarts=RestartPolicy(max_restarts=0, first_delay_s=20.0),
    )

    async def then():
        slot = under_test.supervisor.slots["w-0"]
        die.touch()
        await under_test.until_said("next try in 20 s")
        member = slot.describe(MachineClock().now(), "here")
        under_test.supervisor.request_stop()
        assert (member.state, member.pid) == ("failed", None)
        assert member.reason.startswith("ended too often (exit code 7): see its last lines")
        assert member.reason.endswith("next try after 20 s")

    assert await run_until_ready(under_test, then) is Ending.WORKERS_FAILED
    last = under_test.display.said[-1]
    assert last.startswith("w-0 did not serve any more when it was stopped: ended too often")


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (subprocess.SubprocessError("Exception occurred in preexec_fn."), "Exception occurred in"),
    ],
)
@in_event_loop
async def test_a_worker_that_cannot_be_started_now_is_tried_again(
    tmp_path, monkeypatch, refusal, reason
):
    die = tmp_path / "die"
    under_test = launch("mortal", environment={"STUB_DIE_FILE": str(die)})
    num_refused = 0

    async def refuse(*arguments, **options):
        nonlocal num_refused
        num_refused += 1
        if num_refused < 3:
            raise refusal
        return await spawn(*arguments, **options)

    spawn = supervisor_module.spawn

    async def then():
        monkeypatch.setattr(supervisor_module, "spawn", refuse)
        die.touch()
        await under_test.until_said("w-0 is back")
        under_test.supervisor.request_stop()

    assert await run_until_ready(under_test, then) is Ending.DRAINED
    assert num_refused == 3
    problem = f"w-0 ended: w-0 cannot be started: {reason}"
    (line,) = (each for each in under_test.display.said if each.startswith(problem))
    assert "; restart in 0.02 s" in line


@in_event_loop
async def test_a_worker_comes_back_at_another_port_when_its_own_is_taken(tmp_path, monkeypatch):
    die, members = tmp_path / "die", tmp_path / "members.json"
    under_test = launch("mortal", members=members, environment={"STUB_DIE_FILE": str(die)})
    taken = []

    async def take_port_and_start(supervisor, slot):
        if not taken:
            taken.append(socket.create_server(("127.0.0.1", slot.ports.http)))
        await start_again(supervisor, slot)

    start_again = supervisor_module.Supervisor.start_again
    monkeypatch.setattr(supervisor_module.Supervisor, "start_again", take_port_and_start)

    async def then():
        slot = under_test.supervisor.slots["w-0"]
        before = slot.ports.http
        die.touch()
        await under_test.until_said("w-0 is back")
        assert slot.num_restarts == 2, "the first one has the port that is taken"
        assert slot.ports.http != before
        (listed,) = json.loads(members.read_text())["workers"]
        assert listed["url"] == slot.url == f"http://127.0.0.1:{slot.ports.http}"
        under_test.supervisor.request_stop()

    try:
        assert await run_until_ready(under_test, then) is Ending.DRAINED
    finally:
        for server in taken:
            server.close()


@in_event_loop
async def test_a_gateway_that_ends_too_often_stops_everything(tmp_path):
    die = tmp_path / "die"
    under_test = launch("worker", gateway="mortal", environment={"STUB_DIE_FILE": str(die)})
    running = asyncio.create_task(under_test.run())
    await under_test.until_said("ready after")
    async with killing(die):
        with pytest.raises(ChildFailedError, match=r"gateway ended too often \(exit code 7\)"):
            await running
    assert not any(lives(pid) for pid in under_test.pids().values())


@in_event_loop
async def test_the_second_request_to_stop_kills():
    under_test = launch("stubborn")

    async def then():
        under_test.supervisor.request_stop()
        await asyncio.sleep(0)
        under_test.supervisor.request_stop()

    assert await run_until_ready(under_test, then) is Ending.KILLED
    assert "w-0 (killed by SIGKILL)" in under_test.display.said[-1]


@in_event_loop
async def test_a_process_gets_the_time_that_it_reports_for_its_drain(monkeypatch):
    """After an upgrade it has another drain timeout than the launcher has read at its start."""
    monkeypatch.setattr(slots_module, "KILL_MARGIN_S", 0.2)
    under_test = launch("slow")

    async def then():
        under_test.supervisor.request_stop()

    assert await run_until_ready(under_test, then) is Ending.DRAINED
    assert under_test.display.said[-1] == "stopped: w-0 (exit code 0), gateway (exit code 0)"


@in_event_loop
async def test_a_worker_that_does_not_drain_in_time_is_killed(monkeypatch):
    monkeypatch.setattr(slots_module, "KILL_MARGIN_S", 0.2)
    under_test = launch("stubborn")

    async def then():
        under_test.supervisor.request_stop()

    assert await run_until_ready(under_test, then) is Ending.OVERDUE
    assert under_test.display.said[-1] == "stopped: w-0 (killed by SIGKILL), gateway (exit code 0)"


@in_event_loop
async def test_a_stop_while_starting_leaves_nothing():
    under_test = launch("worker", "worker", gateway="blind")
    running = asyncio.create_task(under_test.run())
    async with asyncio.timeout(30):
        while not under_test.pids():
            await asyncio.sleep(0.01)
    under_test.supervisor.request_stop()
    assert await running is Ending.DRAINED
    assert not any(lives(pid) for pid in under_test.pids().values())
    assert not under_test.services


@in_event_loop
async def test_a_stop_while_a_worker_loads_is_no_failure_of_it():
    under_test = launch("worker", "loading")
    running = asyncio.create_task(under_test.run())
    async with asyncio.timeout(30):
        while "w-1" not in (slots := under_test.supervisor.slots) or not slots["w-1"].child.phase:
            await asyncio.sleep(0.01)
        await slots["w-0"].until_ready()
    under_test.supervisor.request_stop()
    assert await running is Ending.DRAINED
    assert under_test.display.said[-1] == "stopped: w-0 (exit code 0), w-1 (was still starting)"


@in_event_loop
async def test_a_taken_port_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        under_test = launch("worker", port=port)
        holder = rf"port {port} .* taken by pid {os.getpid()} \(.*--port"
        with pytest.raises(ConfigError, match=holder):
            await under_test.run()
    assert not under_test.pids()
