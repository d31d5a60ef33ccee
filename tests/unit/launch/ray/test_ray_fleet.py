"""What an operator is answered, with supervisors that answer from memory."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from baton.config.resolve import CommandLine, resolve
from baton.errors import ConfigError
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetMember, FleetSize
from baton.launch.ray import fleet as fleet_module
from baton.launch.ray.fleet import RayFleet, find_plan
from baton.launch.ray.plan import plan_fleet, role_of, with_assignments
from baton.launch.ray.process import LogTail

PLAN = plan_fleet(
    resolve(CommandLine(assignments=["gateway.insecure=true", "up.decode=2"]), {}),
    "f",
    "1",
    "cost",
    has_key_file=False,
)


class Supervisors:
    """Those of a fleet, in memory. `away` do not answer. `calls` are what changed something."""

    def __init__(self, *names):
        self.names, self.away = set(names), set()
        self.draining, self.calls = set(), []
        self.states, self.labels = {}, {}
        self.tail = LogTail()
        self.locked = set()

    @asynccontextmanager
    async def changing(self, roles, timeout_s):
        """As of `FleetActors`, whose own are in test_change_locks.py."""
        roles = set(roles)
        if self.locked & roles:
            raise FleetError("another command changes it")
        self.locked |= roles
        try:
            yield
        finally:
            self.locked -= roles

    async def list_names(self, timeout_s):
        return frozenset(self.names)

    async def list_fleets(self, timeout_s):
        return ["other"]

    async def remove(self, name, timeout_s):
        self.calls.append(("remove", name))
        self.names.discard(name)

    async def call(self, name, method, *arguments, timeout_s):
        if name in self.away:
            raise FleetError(f"{name} does not answer")
        return getattr(self, f"do_{method}")(name, *arguments)

    def do_plan(self, name):
        return msgspec.json.encode(PLAN)

    def do_status(self, name):
        return msgspec.json.encode(
            FleetMember(
                name=name,
                role=role_of(name),
                state=self.states.get(name, "ready"),
                host="h",
                url=f"https://{name}:1",
                labels=self.labels,
            )
        )

    def do_give_key(self, name, key):
        return None

    def do_replace(self, name):
        return None

    def do_list_used(self, name):
        workers = [each for each in self.names - self.draining if role_of(each) != "gateway"]
        return msgspec.json.encode([f"https://{each}:1" for each in workers])

    def do_mark_draining(self, name):
        self.calls.append(("mark_draining", name))
        self.draining.add(name)

    def do_stop(self, name):
        self.calls.append(("stop", name))
        return "exit code 0"

    def do_lines(self, name, since):
        answer = self.tail.last(-since) if since < 0 else self.tail.since(since)
        return msgspec.json.encode(answer)


@pytest.fixture
def supervisors(monkeypatch):
    monkeypatch.setattr(fleet_module, "GATEWAYS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(fleet_module, "FOLLOW_INTERVAL_S", 0.001)
    return Supervisors("gateway-0", "prefill-0", "decode-0", "decode-1")


def lines_of(lines):
    async def collect():
        return [line async for line in lines]

    return asyncio.run(collect())


def test_status_has_all_processes_in_order(supervisors):
    supervisors.away.add("decode-1")
    status = asyncio.run(RayFleet(supervisors, PLAN, 1.0).status())
    assert (status.fleet, status.backend) == ("f", "ray")
    assert [(m.name, m.state) for m in status.members] == [
        ("gateway-0", "ready"),
        ("prefill-0", "ready"),
        ("decode-0", "ready"),
        ("decode-1", "starting"),
    ]
    assert status.members[3].reason == "decode-1 does not answer"


def test_gateways_know_of_a_drain_before_the_worker_stops(supervisors):
    lines = lines_of(RayFleet(supervisors, PLAN, 1.0).drain("decode-0"))
    assert lines == ["decode-0: draining", "decode-0: exit code 0"]
    assert supervisors.calls == [
        ("mark_draining", "decode-0"),
        ("stop", "decode-0"),
        ("remove", "decode-0"),
    ]


def test_a_worker_whose_host_is_away_is_removed(supervisors):
    supervisors.away.add("decode-0")
    lines = lines_of(RayFleet(supervisors, PLAN, 1.0).drain("decode-0"))
    assert lines[-1] == "decode-0: removed without draining: decode-0 does not answer"
    assert supervisors.calls == [("remove", "decode-0")]


def test_scaling_down_takes_the_newest(supervisors):
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    supervisors.names.add("decode-10")
    lines_of(RayFleet(supervisors, PLAN, 1.0).scale(FleetSize(decode=1)))
    assert [name for call, name in supervisors.calls if call == "stop"] == ["decode-10", "decode-1"]


@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
def test_scaling_down_keeps_those_that_serve(supervisors, name):
    """A host that is lost leaves its worker "starting" without limit."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    supervisors.away.add(name)
    lines_of(RayFleet(supervisors, PLAN, 1.0).scale(FleetSize(decode=1)))
    assert supervisors.calls == [("remove", name)]


@pytest.mark.parametrize("state", ["draining", "ended", "failed"])
def test_workers_that_serve_nobody_do_not_count_and_are_removed(supervisors, state):
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    supervisors.states["decode-0"] = state
    lines_of(RayFleet(supervisors, PLAN, 1.0).scale(FleetSize(decode=1)))
    assert supervisors.calls == [("stop", "decode-0"), ("remove", "decode-0")]
    assert "decode-1" in supervisors.names


@pytest.mark.parametrize("state", ["failed", "starting", "away"])
def test_the_last_worker_that_serves_is_not_drained(supervisors, state):
    if state == "away":
        supervisors.away.add("decode-1")
    else:
        supervisors.states["decode-1"] = state
    with pytest.raises(FleetError, match="decode-0 is the last decode"):
        lines_of(RayFleet(supervisors, PLAN, 1.0).drain("decode-0"))
    assert not supervisors.calls
    lines_of(RayFleet(supervisors, PLAN, 1.0).drain("decode-1"))
    assert "decode-1" not in supervisors.names


def test_a_worker_that_serves_nobody_is_drained_while_another_one_starts(supervisors):
    supervisors.states |= {"decode-0": "failed", "decode-1": "starting"}
    lines_of(RayFleet(supervisors, PLAN, 1.0).drain("decode-0"))
    assert "decode-0" not in supervisors.names
    with pytest.raises(FleetError, match="decode-1 is the last decode"):
        lines_of(RayFleet(supervisors, PLAN, 1.0).drain("decode-1"))


def test_successors_of_assigned_workers_start_where_these_are(supervisors, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    started = []

    def create_supervisor(plan, group, name, *, near):
        started.append((name, near))
        supervisors.names.add(name)

    monkeypatch.setattr("baton.launch.ray.start.create_supervisor", create_supervisor)
    supervisors.labels = {"host": "h", "rack": "r"}
    for plan, near in ((PLAN, None), (with_assignments(PLAN, {"decode-0": "z/r/gone"}), "/r/h")):
        supervisors.names = {"gateway-0", "prefill-0", "decode-0", "decode-1"}
        started.clear()
        lines_of(RayFleet(supervisors, plan, 1.0).upgrade())
        assert started == [("prefill-1", None), ("decode-2", near), ("decode-3", near)]


def test_a_successor_that_does_not_start_ends_the_upgrade_and_nothing_else(
    supervisors, monkeypatch
):
    """It is not taken for one without room, for which a worker that serves would be drained."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

    def create_supervisor(plan, group, name, *, near):
        supervisors.names.add(name)
        supervisors.states[name] = "failed"

    monkeypatch.setattr("baton.launch.ray.start.create_supervisor", create_supervisor)
    supervisors.names.remove("prefill-0")
    before = set(supervisors.names)
    with pytest.raises(FleetError, match=r"decode-0 serves.*decode-2 on h failed") as told:
        lines_of(RayFleet(supervisors, PLAN, 1.0).upgrade())
    assert "`baton drain decode-0`" in str(told.value)
    assert supervisors.names == before
    assert supervisors.calls == [("remove", "decode-2")]


@pytest.mark.parametrize("change", ["scale", "upgrade"])
def test_a_worker_that_never_gets_ready_is_given_up_and_removed(supervisors, monkeypatch, change):
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

    def create_supervisor(plan, group, name, *, near):
        supervisors.names.add(name)
        supervisors.states[name] = "starting"

    monkeypatch.setattr("baton.launch.ray.start.create_supervisor", create_supervisor)
    monkeypatch.setattr(fleet_module, "READY_TIMEOUT_S", 0.01, raising=False)
    supervisors.names.remove("prefill-0")
    supervisors.tail.append("loads")
    before, fleet = set(supervisors.names), RayFleet(supervisors, PLAN, 1.0)
    lines = fleet.upgrade() if change == "upgrade" else fleet.scale(FleetSize(decode=3))

    async def scenario():
        async with asyncio.timeout(5):
            return [line async for line in lines]

    with pytest.raises(FleetError, match=r"decode-2 on h was not ready after 0\.01 s.*\n    loads"):
        asyncio.run(scenario())
    assert supervisors.names == before
    assert supervisors.calls == [("remove", "decode-2")]


@pytest.mark.parametrize(
    "states", ["ready failed", "ready away", "failed ready", "ready ready", "failed failed"]
)
def test_without_room_a_worker_is_drained_first_but_not_the_last_one_that_serves(
    supervisors, monkeypatch, states
):
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    from baton.launch.ray.actors import NoAnswerError  # noqa: PLC0415 - imports Ray

    supervisors.names.remove("prefill-0")
    supervisors.states = dict(zip(("decode-0", "decode-1"), states.split(), strict=True))
    if states == "ready away":  # its host is gone
        del supervisors.states["decode-1"]
        supervisors.away = {"decode-1"}

    def create_supervisor(plan, group, name, *, near):
        supervisors.names.add(name)

    def give_key(name, key):
        if len([each for each in supervisors.names if role_of(each) == "decode"]) > 2:
            raise NoAnswerError("Ray has not placed it")

    monkeypatch.setattr("baton.launch.ray.start.create_supervisor", create_supervisor)
    monkeypatch.setattr("baton.launch.ray.start.list_hosts", list)
    monkeypatch.setattr(supervisors, "do_give_key", give_key)
    lines = RayFleet(supervisors, PLAN, 1.0).upgrade()
    if states in {"ready failed", "ready away"}:
        with pytest.raises(FleetError, match="decode-0 serves as before: there is no room for"):
            lines_of(lines)
        assert "decode-0" in supervisors.names
        assert supervisors.calls == [("remove", "decode-2")]
    else:
        assert "decode-0: no room for its successor beside it; draining it first" in lines_of(lines)
        assert supervisors.names == {"gateway-0", "decode-2", "decode-3"}


def test_a_worker_that_another_command_has_started_is_not_removed(supervisors, monkeypatch):
    """As by an older Baton, which does not lock: it may serve by now."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    from baton.launch.ray import start  # noqa: PLC0415 - imports Ray

    created = []

    class Actor:
        def options(self, *, name, **_):
            self.name = name
            return self

        def remote(self, *_):
            if self.name == "decode-3":
                raise ValueError(f"The name {self.name} (namespace=baton-f) is already taken.")
            created.append(self.name)

    monkeypatch.setattr(start.ray, "remote", lambda _: Actor())
    message = "another command changes the fleet 'f', and has started decode-3 .* try again"
    with pytest.raises(FleetError, match=message):
        lines_of(RayFleet(supervisors, PLAN, 1.0).scale(FleetSize(decode=5)))
    assert created == ["decode-2"]
    assert supervisors.calls == [("remove", "decode-2")]
    assert not supervisors.locked


def test_the_second_role_is_resized_by_what_there_is_then(supervisors, monkeypatch):
    """Between the two reads, a worker that another command had begun to start has come."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    started = []

    def create_supervisor(plan, group, name, *, near):
        started.append(name)
        supervisors.names |= {name, "decode-2"}

    monkeypatch.setattr("baton.launch.ray.start.create_supervisor", create_supervisor)
    lines_of(RayFleet(supervisors, PLAN, 1.0).scale(FleetSize(prefill=2, decode=4)))
    assert started == ["prefill-1", "decode-3"]


@pytest.mark.parametrize("change", ["scale", "drain", "upgrade"])
def test_nothing_else_changes_workers_while_an_upgrade_does(supervisors, monkeypatch, change):
    """An autoscaler counts a successor as one more, and would take it out again."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

    def create_supervisor(plan, group, name, *, near):
        supervisors.names.add(name)

    monkeypatch.setattr("baton.launch.ray.start.create_supervisor", create_supervisor)

    def other():
        fleet = RayFleet(supervisors, PLAN, 1.0)
        if change == "drain":
            return fleet.drain("decode-1")
        return fleet.upgrade() if change == "upgrade" else fleet.scale(FleetSize(decode=2))

    async def scenario():
        async with aclosing(RayFleet(supervisors, PLAN, 1.0).upgrade()) as lines:
            async for line in lines:
                if line.startswith("decode-2: ready"):
                    break
            with pytest.raises(FleetError, match="another command changes it"):
                await anext(other())
            return [line async for line in lines]

    assert asyncio.run(scenario())[-1] == "gateway-0: serves again"
    assert supervisors.names == {"gateway-0", "prefill-1", "decode-2", "decode-3"}
    assert not supervisors.locked


def test_roles_are_changed_at_the_same_time(supervisors):
    """The autoscaler does so: one role may wait for a host for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

    async def scenario():
        fleet = RayFleet(supervisors, PLAN, 1.0)
        async with aclosing(fleet.scale(FleetSize(decode=1))) as lines:
            assert await anext(lines) == "decode-1: draining"
            return [line async for line in fleet.scale(FleetSize(prefill=0))]

    assert asyncio.run(scenario()) == ["prefill-0: draining", "prefill-0: exit code 0"]


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("decode-7", "no process 'decode-7'; it has gateway-0, prefill-0, decode-0, decode-1"),
        ("gateway-0", "the last gateway"),
    ],
)
def test_drains_that_are_refused(supervisors, worker, message):
    with pytest.raises(FleetError, match=message):
        lines_of(RayFleet(supervisors, PLAN, 1.0).drain(worker))
    assert not supervisors.calls


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (FleetSize(decode=0), "no worker would decode"),
        (FleetSize(both=1), "no workers of the role both: it has prefill, decode"),
    ],
)
def test_sizes_that_are_refused(supervisors, size, message):
    with pytest.raises(FleetError, match=message):
        lines_of(RayFleet(supervisors, PLAN, 1.0).scale(size))
    assert not supervisors.calls


def test_the_last_decode_worker_stays(supervisors):
    supervisors.names.discard("decode-1")
    with pytest.raises(FleetError, match="decode-0 is the last decode"):
        lines_of(RayFleet(supervisors, PLAN, 1.0).drain("decode-0"))


@pytest.mark.parametrize("num_lines", [0, 1, 2])
def test_logs_are_the_last_lines_and_those_that_follow(supervisors, num_lines):
    for line in ("a", "b"):
        supervisors.tail.append(line)

    async def scenario():
        logs = RayFleet(supervisors, PLAN, 1.0).logs("decode-0", num_lines, follow=True)
        found = [await anext(logs) for _ in range(num_lines)]
        following = asyncio.ensure_future(anext(logs))
        await asyncio.sleep(0.01)
        supervisors.tail.append("c")
        return [*found, await following]

    assert asyncio.run(scenario()) == [*("a", "b")[2 - num_lines :], "c"]


def test_the_plan_comes_from_any_supervisor_that_answers(supervisors):
    supervisors.away |= {"gateway-0", "decode-0"}
    assert asyncio.run(find_plan(supervisors, "f")) == PLAN
    supervisors.away |= supervisors.names
    with pytest.raises(FleetError, match="no supervisor of the fleet 'f' answers"):
        asyncio.run(find_plan(supervisors, "f"))


def test_a_fleet_that_does_not_run(supervisors):
    supervisors.names.clear()
    with pytest.raises(FleetError, match="no fleet 'f' runs on this Ray; running: other"):
        asyncio.run(find_plan(supervisors, "f"))


@pytest.mark.parametrize(
    "message",
    [
        "The name gateway-0 (namespace=baton-f) is already taken.",
        "Actor with name 'gateway-0' already exists in the namespace baton-f",
    ],
)
def test_who_starts_a_fleet_at_the_same_time_as_another_removes_nothing(
    supervisors, monkeypatch, message
):
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    from baton.launch.ray import start  # noqa: PLC0415 - imports Ray

    class TakenName:
        def options(self, **_):
            return self

        def remote(self, *_):
            raise ValueError(message)

    monkeypatch.setattr(start.ray, "remote", lambda _: TakenName())
    listed, supervisors.names = supervisors.names, set()
    with pytest.raises(ConfigError, match="the fleet 'f' runs already"):
        asyncio.run(
            start.start_fleet(supervisors, PLAN, "", timeout_s=1.0, on_waiting=lambda _: None)
        )
    supervisors.names = listed
    assert supervisors.calls == []
