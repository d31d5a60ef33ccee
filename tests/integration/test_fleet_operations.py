"""Scale, drain and upgrade of a launch over real processes that load no model, and its control."""

import asyncio
import errno
import http.client
import json
import os
import signal
import stat
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from baton.launch import control as control_module
from baton.launch import local as local_module
from baton.launch import operations as operations_module
from baton.launch import slots as slots_module
from baton.launch import supervisor as supervisor_module
from baton.launch.control import Control
from baton.launch.control_messages import DownRequest
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetSize
from baton.launch.folder import claim, fleet_folder
from baton.launch.local import LocalFleet
from baton.launch.operations import FleetOperations
from tests.integration.stub_launch import in_event_loop, launch, lives, run_until_ready


def listed(members):
    """URLs in the members file."""
    return {each["url"] for each in json.loads(members.read_text())["workers"]}


def urls(under_test):
    return {slot.url for slot in under_test.supervisor.slots.values() if slot.plan is not None}


async def operated(tmp_path, then, *behaviours, environment=None, gateway="gateway", roles=()):
    """Run a launch and, when it serves, `then(launch, operations, steps)`; then stop it.

    `roles` of the first workers; others are decode workers.
    """
    under_test = launch(
        *behaviours,
        gateway=gateway,
        environment=environment,
        members=tmp_path / "members.json",
    )
    plan = under_test.supervisor.plan
    changed = (replace(each, role=role) for each, role in zip(plan.workers, roles, strict=False))
    plan.workers = (*changed, *plan.workers[len(roles) :])
    steps = []

    async def run():
        operations = FleetOperations("stub", under_test.supervisor)
        try:
            await then(under_test, operations, steps)
        finally:
            under_test.supervisor.request_stop()

    await run_until_ready(under_test, run)
    assert not any(lives(pid) for pid in under_test.pids().values())
    return steps


class Load:
    """Requests on new connections, one after the other, until it is closed."""

    def __init__(self, url):
        self._port = urlsplit(url).port
        self.pids, self.num_failed, self._is_ended = set(), 0, False

    def run(self):
        while not self._is_ended:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            try:
                connection.request("GET", "/v1/models")
                answer = connection.getresponse()
                answer.read()
                self.pids.add(answer.headers["stub-pid"])
            except (OSError, http.client.HTTPException):
                self.num_failed += 1
            finally:
                connection.close()

    def end(self):
        self._is_ended = True


@asynccontextmanager
async def loaded(url):
    load = Load(url)
    running = asyncio.create_task(asyncio.to_thread(load.run))
    try:
        yield load
    finally:
        load.end()
        await running


@in_event_loop
async def test_a_fleet_grows_and_shrinks_while_it_serves(tmp_path):
    members = tmp_path / "members.json"

    async def then(under_test, operations, steps):
        slots = under_test.supervisor.slots
        before = under_test.pids()
        await operations.scale(FleetSize(decode=4), steps.append)
        assert list(slots) == ["w-0", "w-1", "gateway", "w-2", "w-3"]
        assert listed(members) == urls(under_test)
        assert {name: under_test.pids()[name] for name in before} == before
        leaving = [under_test.pids()[name] for name in ("w-1", "w-3")]
        # w-2 and w-0 have requests; of those that have none all go.
        await operations.scale(FleetSize(decode=2), steps.append)
        assert list(slots) == ["w-0", "gateway", "w-2"]
        assert listed(members) == urls(under_test)
        assert not any(lives(pid) for pid in leaving)
        # Names are not used again: their logs and metrics are another worker's.
        await operations.scale(FleetSize(decode=3), steps.append)
        assert "w-4" in slots

    environment = {"STUB_BUSY": json.dumps({"w-0": 2, "w-2": 1})}
    steps = await operated(tmp_path, then, "worker", "worker", environment=environment)
    assert steps.index("w-2 starts") < steps.index("w-3 drains") < steps.index("w-4 starts")
    assert "w-1 ended (exit code 0)" in steps
    assert steps[-1] == "serving: 3 decode"


@in_event_loop
async def test_a_preempted_worker_is_replaced_and_not_started_again(tmp_path):
    notice, members = tmp_path / "notice", tmp_path / "members.json"

    async def until(condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    async def then(under_test, operations, steps):
        slots = under_test.supervisor.slots
        notice.touch()
        await until(lambda: slots["w-1"].is_leaving)
        member = operations.status().members[1]
        assert (member.state, member.reason) == ("draining", "its machine will be taken")
        await operations.scale(FleetSize(decode=2), steps.append)
        assert list(slots) == ["w-0", "w-1", "gateway", "w-2"], "it is not one of the two"
        (drained,) = (w for w in json.loads(members.read_text())["workers"] if w.get("draining"))
        assert drained["url"] == slots["w-1"].url
        notice.touch()
        await until(lambda: "w-1" not in slots)
        await asyncio.sleep(0.1)  # more than until a restart
        assert list(slots) == ["w-0", "gateway", "w-2"]
        assert listed(members) == urls(under_test)
        assert any("not started again" in line for line in under_test.display.said)

    environment = {"STUB_DIE_FILE": str(notice)}
    steps = await operated(tmp_path, then, "worker", "spot", environment=environment)
    assert steps == ["w-2 starts", steps[1], "serving: 2 decode"]


@in_event_loop
async def test_a_worker_that_does_not_start_leaves_the_others(tmp_path):
    behaviour, members = tmp_path / "behaviour", tmp_path / "members.json"
    behaviour.write_text("worker")

    async def then(under_test, operations, steps):
        before = under_test.pids()
        behaviour.write_text("broken")
        with pytest.raises(FleetError, match=r"(?s)w-1 ended while starting .*steam"):
            await operations.scale(FleetSize(decode=2), steps.append)
        assert under_test.pids() == before
        with pytest.raises(FleetError, match=r"the upgrade stopped at w-0: w-2 ended while"):
            await operations.upgrade(steps.append)
        assert under_test.pids() == before
        assert all(lives(pid) for pid in before.values())
        assert listed(members) == urls(under_test)

    await operated(tmp_path, then, str(behaviour))


def refuse_to_spawn(monkeypatch, *names):
    """No process of these names can be started."""

    async def spawn(name, *arguments, **options):
        if name in names:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return await really(name, *arguments, **options)

    really = supervisor_module.spawn
    monkeypatch.setattr(supervisor_module, "spawn", spawn)


@in_event_loop
async def test_where_the_workers_cannot_be_listed_all_is_as_before(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def then(under_test, operations, steps):
        before = under_test.pids()
        with monkeypatch.context() as patch:
            patch.setattr(supervisor_module, "write_members", refuse)
            for num_workers in (3, 1):
                with pytest.raises(FleetError, match=r"cannot write .*: No space left"):
                    await operations.scale(FleetSize(decode=num_workers), steps.append)
                assert under_test.pids() == before
        states = {member.name: member.state for member in operations.status().members}
        assert set(states.values()) == {"ready"}
        await operations.scale(FleetSize(decode=1), steps.append)
        assert len(under_test.pids()) == 2, "it was taken out the next time"

    await operated(tmp_path, then, "worker", "worker")


@in_event_loop
async def test_a_worker_that_is_ended_leaves_where_the_others_cannot_be_listed(
    tmp_path, monkeypatch
):
    write_members, num_written = supervisor_module.write_members, 0

    def write_once(*arguments):
        nonlocal num_written
        num_written += 1
        if num_written > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_members(*arguments)

    async def then(under_test, operations, steps):
        with monkeypatch.context() as patch:
            patch.setattr(supervisor_module, "write_members", write_once)
            await operations.drain("w-1", steps.append)
        assert list(under_test.supervisor.slots) == ["w-0", "gateway"]
        assert any("cannot write" in line for line in under_test.display.said)

    await operated(tmp_path, then, "worker", "worker")


@in_event_loop
async def test_a_process_that_cannot_be_started_leaves_the_others(tmp_path, monkeypatch):
    async def then(under_test, operations, steps):
        with monkeypatch.context() as patch:
            refuse_to_spawn(patch, "w-2")
            with pytest.raises(FleetError, match="w-2 cannot be started: Cannot allocate memory"):
                await operations.scale(FleetSize(decode=4), steps.append)
        slots = under_test.supervisor.slots
        assert list(slots) == ["w-0", "gateway", "w-1", "w-3"]
        assert listed(tmp_path / "members.json") == urls(under_test)
        assert all(slot.restarter is not None for slot in slots.values())

    steps = await operated(tmp_path, then, "worker")
    assert any(step.startswith("w-3 serves") for step in steps)


@in_event_loop
async def test_without_room_a_worker_that_cannot_be_started_again_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(operations_module, "has_room_for_another", lambda _: False)

    async def then(under_test, operations, steps):
        with monkeypatch.context() as patch:
            refuse_to_spawn(patch, "w-0")
            with pytest.raises(FleetError, match="the upgrade stopped at w-0: w-0 cannot be"):
                await operations.upgrade(steps.append)
        assert list(under_test.supervisor.slots) == ["w-1", "gateway"]
        assert listed(tmp_path / "members.json") == urls(under_test)

    await operated(tmp_path, then, "worker", "worker")


@pytest.mark.parametrize(
    ("has_room", "at", "left"),
    [
        pytest.param(True, "w-0", ["gateway", "w-3", "w-4"], marks=pytest.mark.every),
        (True, "w-1", ["gateway", "w-3", "w-4", "w-5"]),
        (False, "w-0", ["w-0", "w-2", "gateway"]),
        pytest.param(False, "w-1", ["w-0", "w-2", "gateway"], marks=pytest.mark.every),
    ],
)
def test_a_worker_whose_machine_is_taken_during_an_upgrade_does_not_end_it(
    tmp_path, monkeypatch, has_room, at, left
):
    """It leaves while `at` is replaced: before its turn, or in it."""
    notice = tmp_path / "notice"

    def wait_while(condition):
        deadline = time.monotonic() + 60
        while condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    async def then(under_test, operations, steps):
        slots, before = under_test.supervisor.slots, under_test.pids()

        def find_room(pid):
            if pid == before[at]:
                notice.touch()
                wait_while(notice.exists)
                notice.touch()
                wait_while(lambda: "w-1" in slots)
                notice.unlink()  # else its successor reads it, too
            return has_room

        monkeypatch.setattr(operations_module, "has_room_for_another", find_room)
        await operations.upgrade(steps.append)
        assert list(slots) == left
        assert not set(before.values()) & set(under_test.pids().values())
        assert listed(tmp_path / "members.json") == urls(under_test)

    async def scenario():
        environment = {"STUB_DIE_FILE": str(notice)}
        return await operated(tmp_path, then, "worker", "spot", "worker", environment=environment)

    steps = asyncio.run(scenario())
    assert steps[-1].startswith("every process runs the installed code")


@in_event_loop
async def test_what_would_end_the_answers_is_refused(tmp_path):
    async def then(under_test, operations, steps):
        before = under_test.pids()
        for change, message in [
            (operations.drain("w-7", steps.append), "no worker 'w-7'; there are w-0"),
            (operations.drain("gateway", steps.append), "no worker 'gateway'"),
            (operations.drain("w-0", steps.append), "the last worker that generates answers"),
            (operations.scale(FleetSize(decode=0), steps.append), "no worker would be left"),
            (operations.scale(FleetSize(prefill=1), steps.append), "--prefill does not fit"),
            (operations.scale(FleetSize(), steps.append), "This fleet takes --decode"),
        ]:
            with pytest.raises(FleetError, match=message):
                await change
        assert under_test.pids() == before

    assert await operated(tmp_path, then, "worker") == []


@in_event_loop
async def test_a_worker_that_has_failed_counts_for_nothing_and_is_replaced(tmp_path):
    behaviour = tmp_path / "behaviour"
    behaviour.write_text("worker")

    async def then(under_test, operations, steps):
        behaviour.write_text("broken")
        os.kill(under_test.pids()["w-1"], signal.SIGKILL)
        await under_test.until_said("w-1 ended too often (exit code 3): a dependency is missing")
        states = {member.name: member.state for member in operations.status().members}
        assert (states["w-0"], states["w-1"]) == ("ready", "failed")
        with pytest.raises(FleetError, match="w-0 is the last worker that generates answers"):
            await operations.drain("w-0", steps.append)
        await operations.scale(FleetSize(decode=2), steps.append)
        states = {member.name: member.state for member in operations.status().members}
        assert states == {"w-0": "ready", "gateway": "ready", "w-2": "ready"}, "it was replaced"

    environment = {"STUB_BUSY": json.dumps({"w-0": 1, "w-1": 9})}
    await operated(tmp_path, then, "worker", str(behaviour), environment=environment)


@in_event_loop
async def test_a_change_of_one_role_leaves_those_of_the_others(tmp_path):
    """A failed one may be repaired and started again; another change may be under way."""
    behaviour = tmp_path / "behaviour"
    behaviour.write_text("worker")

    async def then(under_test, operations, steps):
        behaviour.write_text("broken")
        os.kill(under_test.pids()["w-0"], signal.SIGKILL)
        await under_test.until_said("w-0 ended too often (exit code 3): a dependency is missing")
        await operations.scale(FleetSize(decode=1), steps.append)
        states = {member.name: member.state for member in operations.status().members}
        assert states == {"w-0": "failed", "w-1": "ready", "gateway": "ready"}

    steps = await operated(tmp_path, then, str(behaviour), "worker", "worker", roles=["prefill"])
    assert [each for each in steps if "drains" in each] == ["w-2 drains"]


@in_event_loop
async def test_the_only_worker_that_serves_stays(tmp_path, monkeypatch):
    """Another one that loads counts, and answers nothing."""
    monkeypatch.setattr(operations_module, "has_room_for_another", lambda _: False)
    behaviour = tmp_path / "behaviour"
    behaviour.write_text("worker")

    async def then(under_test, operations, steps):
        slots, before = under_test.supervisor.slots, under_test.pids()
        behaviour.write_text("loading")
        os.kill(before["w-1"], signal.SIGKILL)
        async with asyncio.timeout(60):
            while slots["w-1"].state != "starting" or slots["w-1"].child.pid == before["w-1"]:
                await asyncio.sleep(0.01)
        for change in (operations.drain("w-0", steps.append), operations.upgrade(steps.append)):
            with pytest.raises(FleetError, match="w-0 is the last worker that generates answers"):
                await change
        assert under_test.pids()["w-0"] == before["w-0"]
        await operations.scale(FleetSize(decode=1), steps.append)
        assert list(slots) == ["w-0", "gateway"]
        assert under_test.pids()["w-0"] == before["w-0"]

    environment = {"STUB_BUSY": json.dumps({"w-0": 1, "w-1": 9})}
    steps = await operated(tmp_path, then, "worker", str(behaviour), environment=environment)
    assert steps == ["w-1 drains", "w-1 ended (was still starting)", "serving: 1 decode"]


@in_event_loop
async def test_an_upgrade_replaces_every_process_under_load(tmp_path):
    async def then(under_test, operations, steps):
        before = under_test.pids()
        async with loaded(under_test.services[0].url) as load:
            await operations.upgrade(steps.append)
        after = under_test.pids()
        assert not set(before.values()) & set(after.values())
        assert list(after) == ["gateway", "w-2", "w-3"]
        assert not any(lives(pid) for pid in before.values())
        assert load.num_failed == 0
        assert load.pids == {str(before["gateway"]), str(after["gateway"])}

    steps = await operated(tmp_path, then, "worker", "worker")
    assert [step for step in steps if "ended" in step] == [
        "w-0 ended (exit code 0)",
        "w-1 ended (exit code 0)",
        "the old gateway ended (exit code 0)",
    ]


@in_event_loop
async def test_where_there_is_no_room_a_worker_ends_before_the_next_one_starts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(operations_module, "has_room_for_another", lambda _: False)

    async def then(under_test, operations, steps):
        slots, before = under_test.supervisor.slots, under_test.pids()
        at = {name: slot.url for name, slot in slots.items()}
        await operations.upgrade(steps.append)
        assert {name: slot.url for name, slot in slots.items()} == at
        assert not set(before.values()) & set(under_test.pids().values())
        await operations.drain("w-0", steps.append)
        with pytest.raises(FleetError, match="requests would fail without it"):
            await operations.upgrade(steps.append)

    steps = await operated(tmp_path, then, "worker", "worker")
    assert steps.index("w-0 drains") < steps.index("w-1 drains")


@in_event_loop
async def test_a_gateway_that_does_not_start_leaves_the_old_one(tmp_path):
    behaviour = tmp_path / "behaviour"
    behaviour.write_text("gateway")

    async def then(under_test, operations, steps):
        before = under_test.pids()["gateway"]
        under_test.supervisor.plan.gateway = "broken"
        async with loaded(under_test.services[0].url) as load:
            with pytest.raises(FleetError, match=r"(?s)the old one serves on.*steam"):
                await operations.upgrade(steps.append)
        assert under_test.pids()["gateway"] == before
        assert load.num_failed == 0
        assert load.pids == {str(before)}

    await operated(tmp_path, then, "worker")


@asynccontextmanager
async def controlled(tmp_path, *behaviours):
    """A launch that is controlled over its socket; ended at the end."""
    folder = fleet_folder("stub", {"XDG_STATE_HOME": str(tmp_path)})
    with claim(folder):
        under_test = launch(*behaviours, members=folder.members)
        supervisor = under_test.supervisor
        control = Control(supervisor, FleetOperations("stub", supervisor), lambda _: None)
        async with control.serving(folder):
            running = asyncio.create_task(under_test.run())
            try:
                await under_test.until_said("ready after")
                yield under_test, folder
            finally:
                if not supervisor.is_stopping:
                    supervisor.request_stop()
                await running


async def lines(steps):
    return [line async for line in steps]


@in_event_loop
async def test_a_fleet_is_controlled_over_its_socket(tmp_path, monkeypatch):
    async with controlled(tmp_path / ("x" * 120), "worker") as (under_test, folder):
        fleet = LocalFleet(folder)
        status = await fleet.status()
        assert [(m.name, m.role, m.state) for m in status.members] == [
            ("w-0", "decode", "ready"),
            ("gateway", "gateway", "ready"),
        ]
        assert status.members[0].pid == under_test.pids()["w-0"]
        steps = await lines(fleet.scale(FleetSize(decode=2)))
        assert (steps[0], steps[-1]) == ("w-1 starts", "serving: 2 decode")
        with pytest.raises(FleetError, match="there is no worker 'w-9'"):
            await lines(fleet.drain("w-9"))
        with monkeypatch.context() as patch:
            patch.setattr(control_module, "peer_user", lambda _: os.geteuid() + 1)
            with pytest.raises(FleetError, match="closed the connection"):
                await fleet.status()
        for nonsense in (b"nonsense\n", b'{"verb":"dance"}\n', b"x" * 5_000):
            assert b'"refused"' in await answer_to(folder, nonsense)
        assert stat.S_IMODE(folder.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@in_event_loop
async def test_who_ends_a_fleet_learns_that_a_process_had_to_be_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(slots_module, "KILL_MARGIN_S", 0.2)
    launchers = [os.getpid(), os.getpid(), None]
    monkeypatch.setattr(local_module, "find_launcher", lambda _: launchers.pop(0))
    async with controlled(tmp_path, "worker", "stubborn") as (_, folder):
        steps = LocalFleet(folder).down()
        assert (await anext(steps)).startswith("draining ")
        ends = "w-0 (exit code 0), w-1 (killed by SIGKILL), gateway (exit code 0)"
        assert await anext(steps) == f"stopped: {ends}"
        with pytest.raises(FleetError, match="processes that took too long had to be killed"):
            await anext(steps)
        assert launchers == [], "the next launcher may start"


@in_event_loop
async def test_an_operation_goes_on_without_whoever_asked_and_ends_with_the_launch(tmp_path):
    async with controlled(tmp_path, "worker", "worker") as (under_test, folder):
        fleet = LocalFleet(folder)
        async with aclosing(fleet.upgrade()) as steps:
            assert await anext(steps) == "w-2 starts"
        with pytest.raises(FleetError, match="`baton upgrade` is under way"):
            await lines(fleet.drain("w-1"))
        async with asyncio.timeout(30):
            while "w-2" not in {m.name for m in (await fleet.status()).members if m.url}:
                await asyncio.sleep(0.01)
        steps = await lines(fleet._change(DownRequest()))
        assert steps[0].startswith("draining ")
    assert not any(lives(pid) for pid in under_test.pids().values())


async def answer_to(folder, request):
    with control_module.short_path(folder.socket) as path:
        reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
