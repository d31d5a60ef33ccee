"""Who may change a fleet on Ray, with a Ray that keeps names in memory."""

import asyncio

import pytest

from baton.launch.errors import FleetError

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from baton.launch.ray import actors
from baton.launch.ray.actors import FleetActors


class Ray:
    """What `FleetActors` needs of it: an actor's handle is its namespace and name."""

    def __init__(self):
        self.names, self.is_connected = set(), True

    def remote(self, _):
        return self

    def options(self, *, namespace, name, lifetime, **_):
        assert lifetime == "non_detached", "it would outlive a command that is killed"
        return Options(self, (namespace, name))

    def is_initialized(self):
        return self.is_connected

    def kill(self, actor):
        assert self.is_connected, "Ray would be started for it"
        self.names.remove(actor)


class Options:
    def __init__(self, ray, actor):
        self.ray, self.actor = ray, actor

    def remote(self):
        if self.actor in self.ray.names:
            raise ValueError("The name is already taken.")
        self.ray.names.add(self.actor)
        return self.actor


@pytest.fixture
def ray(monkeypatch):
    ray = Ray()
    monkeypatch.setattr(actors, "ray", ray)
    return ray


def test_one_command_at_a_time_changes_a_role(ray):
    async def scenario():
        mine, other = FleetActors("f"), FleetActors("f")
        async with mine.changing(["decode"], 1.0):
            with pytest.raises(FleetError, match=r"another command .* changes the decode pro"):
                async with other.changing(["prefill", "decode"], 1.0):
                    pass
            assert len(ray.names) == 1, "the lock that it did get was given back"
            async with other.changing(["prefill"], 1.0), FleetActors("g").changing(["decode"], 1.0):
                assert len(ray.names) == 3
        async with other.changing(["prefill", "decode"], 1.0):
            assert len(ray.names) == 2

    asyncio.run(scenario())
    assert not ray.names


def test_locks_are_no_fleets(ray):
    """Commands list all fleets by their namespaces."""

    async def scenario():
        async with FleetActors("f").changing(["decode"], 1.0):
            assert [name for name, _ in ray.names] == ["changes-of-baton-f"]

    asyncio.run(scenario())


def test_ray_is_not_started_again_to_give_a_lock_back(ray):
    """A command whose reader is gone (`| head -1`) disconnects before its generators end."""

    async def scenario():
        async with FleetActors("f").changing(["decode"], 1.0):
            ray.is_connected = False

    asyncio.run(scenario())
