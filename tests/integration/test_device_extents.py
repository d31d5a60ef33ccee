"""Extents of one device, held by several real processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.transfer.devices.table import Extent, compute_largest_gap
from tests.examples import examples

MIB = 1 << 20
DEVICE_BYTES = 18 * MIB
FIRST = 2 * MIB
HOLDER = Path(__file__).with_name("extent_holder.py")


class Process:
    def __init__(self, path):
        self.process = subprocess.Popen(
            [sys.executable, HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, *order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"the holder ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, *order):
        self.say(*order)
        return self.hear()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Fleet:
    """Three processes, and what each of them holds: `(process, start)` → bytes."""

    def __init__(self, path):
        self.path = path
        self.processes = [Process(path) for _ in range(3)]
        self.held = {}

    def claim(self, number, num_mib):
        extents = [Extent(bytes(16), s, n, 0, "") for (_, s), n in self.held.items()]
        room = compute_largest_gap(extents, FIRST, DEVICE_BYTES)
        claimed = self.processes[number].ask("claim", num_mib * MIB)
        if claimed is None:
            assert room < -(-num_mib // 2) * 2 * MIB
            return
        start, num_bytes, _ = claimed
        assert num_bytes >= num_mib * MIB
        assert start % (2 * MIB) == num_bytes % (2 * MIB) == 0
        assert FIRST <= start < start + num_bytes <= DEVICE_BYTES
        for (_, other), length in self.held.items():
            assert start + num_bytes <= other or other + length <= start
        self.held[number, start] = num_bytes

    def release(self, number):
        for holder, start in list(self.held):
            if holder == number:
                self.processes[number].ask("release", start)
                del self.held[holder, start]
                return

    def kill(self, number):
        self.processes[number].kill()
        self.processes[number] = Process(self.path)
        self.held = {key: n for key, n in self.held.items() if key[0] != number}

    def close(self):
        for process in self.processes:
            process.kill()


@pytest.fixture
def device():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"\xee" * DEVICE_BYTES)
        file.flush()
        yield file.name


@pytest.fixture
def fleet(device):
    fleet = Fleet(device)
    yield fleet
    fleet.close()


who = st.integers(0, 2)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), who, st.integers(1, 9)),
        st.tuples(st.just("claim"), who, st.integers(1, 3)),
        st.tuples(st.just("release"), who),
        st.tuples(st.just("kill"), who),
    ),
    max_size=12,
)


@settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps)
def test_no_two_processes_ever_hold_the_same_byte(fleet, orders):
    for name, *arguments in orders:
        getattr(fleet, name)(*arguments)
    for number, start in list(fleet.held):
        fleet.processes[number].ask("release", start)
    fleet.held.clear()


def test_processes_that_race_for_a_full_device_never_write_over_each_other(fleet):
    for seed, process in enumerate(fleet.processes):
        process.say("race", seed, 150)
    for process in fleet.processes:
        assert process.hear() > 0


def test_a_dead_workers_extent_is_kept_while_a_peer_maps_it(fleet):
    owner, peer, other = fleet.processes
    start, num_bytes, id_ = owner.ask("claim", 16 * MIB)
    assert peer.ask("attach", id_, num_bytes // 4096)
    owner.kill()
    assert other.ask("claim", 2 * MIB) is None  # the peer may still store into it
    peer.kill()
    assert other.ask("claim", 16 * MIB)[:2] == [start, num_bytes]  # zeroed, which it checks


def test_a_stopped_workers_extent_stays_its_own(fleet):
    owner, _, other = fleet.processes
    assert owner.ask("claim", 16 * MIB)
    os.kill(owner.process.pid, signal.SIGSTOP)
    assert other.ask("claim", 2 * MIB) is None
    os.kill(owner.process.pid, signal.SIGCONT)
    assert owner.ask("write", FIRST, 7)
