"""What NIXL does to the process around it, and to a peer that stands still or lives elsewhere."""

import importlib.util
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.kv.copies import PageCopies
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_contract.process import SHAPES, OwnerProcess
from baton.testing.transport_pair import Side, TransportPair, whole_pages
from baton.transfer.interface import (
    TRANSPORTS,
    PageRead,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteLost,
    TransportContext,
)
from baton.transfer.region import allocate_host_region
from baton.transfer.transports.nixl.agent import Agent

if importlib.util.find_spec("nixl_cu12") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

CHILD = """
import json, os, sys
from baton.testing.transport_contract.kit import TransportKit, check_write, NUM_PAGES, PAGE_BYTES
from baton.testing.transport_pair import TransportPair, whole_pages

class Kit(TransportKit):
    kind = "nixl"
    options = {"lanes": sys.argv[1]}

kit = Kit()
pair = TransportPair.of(kit.make_side(), kit.make_side())
pair.writer.fill(seed=1)
remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
groups = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]
check_write(pair, remote, grant, groups)
"""
FORK = """
child = os.fork()
if child == 0:
    try:
        pair.writer.transport.submit(pair.write(remote, grant, groups))
    except Exception as exc:
        print(type(exc).__name__, flush=True)
    pair.close()
    sys.exit(7)  # with all finalizers
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
pair.writer.fill(seed=2)
check_write(pair, remote, grant, groups)
print(status, "and the parent goes on", flush=True)
"""
LISTENING = """
import socket
def listening():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add("unix" if sock.family == socket.AF_UNIX else sock.getsockname()[0])
    return sorted(found)
print(json.dumps(listening()), flush=True)
"""

OWNER = """
import sys, select, msgspec
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.testing.transport_pair import Side
from baton.transfer.interface import TRANSPORTS, TransportContext
from baton.transfer.region import allocate_host_region

key, host = Credentials.of(ClusterKey.from_hex(sys.argv[1])), sys.argv[2]
context = TransportContext(key, new_epoch(), host, MachineClock())
transport = TRANSPORTS.build("nixl", {"lanes": "network"})(context)
side = Side.start(transport, context.epoch, allocate_host_region([(1024, 65536)]))
side.fill(seed=6)
sys.stdout.buffer.write(msgspec.json.encode(side.descriptor) + b"\\n")
sys.stdout.flush()
while not select.select([sys.stdin], [], [], 0)[0]:
    select.select([sys.stdin, transport.readiness_fd], [], [], 5.0)  # it says when it is ready
    transport.poll()
side.close()
"""


class HostKit(TransportKit):
    kind = "nixl"


class NetworkKit(TransportKit):
    kind = "nixl"
    options: ClassVar[Mapping[str, object]] = {"lanes": "network"}


def run(lanes, *parts, status):
    done = subprocess.run(
        [sys.executable, "-c", "".join((CHILD, *parts)), lanes],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("lanes", ["host", "network"])
def test_a_process_ends_as_it_wants_to(lanes):
    """With a pair that is open; the next test's has closed its own."""
    run(lanes, "sys.exit(5)", status=5)


@pytest.mark.parametrize("lanes", ["host", "network"])
def test_a_forked_child_that_ends_leaves_the_parent_in_peace(lanes):
    lines = run(lanes, FORK, "pair.close()", status=0)
    assert lines == ["TransferError", "7 and the parent goes on"]


def test_nothing_listens_to_the_network_unless_asked_to():
    assert json.loads(run("host", LISTENING, status=0)[-1]) == ["unix"]
    assert json.loads(run("network", LISTENING, status=0)[-1]) == ["127.0.0.1"]


def test_it_takes_no_core_while_nothing_moves():
    pair = TransportPair.of(NetworkKit().make_side(), NetworkKit().make_side())
    pair.attach()

    def measure_cpu_s() -> float:
        before = time.process_time()
        pair.poll_for(0.5)
        return time.process_time() - before

    # A busy machine makes the same work dearer for a while; what spins does so each time.
    assert any(measure_cpu_s() < 0.1 for _ in range(3))
    pair.close()


NETNS = "baton-nixl-test"


@pytest.fixture
def namespace():
    """A network namespace that is joined to this one by a cable: 10.77.0.1 here, .2 there."""
    commands = [
        f"ip netns add {NETNS}",
        f"ip link add baton-nixl0 type veth peer name baton-nixl1 netns {NETNS}",
        "ip addr add 10.77.0.1/30 dev baton-nixl0",
        "ip link set baton-nixl0 up",
        f"ip -n {NETNS} addr add 10.77.0.2/30 dev baton-nixl1",
        f"ip -n {NETNS} link set baton-nixl1 up",
        f"ip -n {NETNS} link set lo up",
    ]
    for command in commands:
        if subprocess.run(command.split(), capture_output=True, check=False).returncode != 0:
            subprocess.run(["ip", "netns", "del", NETNS], capture_output=True, check=False)
            pytest.skip(f"no network namespaces here: {command}")
    yield ["ip", "netns", "exec", NETNS]
    subprocess.run(["ip", "link", "del", "baton-nixl0"], check=True)
    subprocess.run(["ip", "netns", "del", NETNS], check=True)


def test_an_owner_that_stands_still_is_read_on_one_host():
    kit = HostKit()
    with OwnerProcess(kit.make_side(SHAPES), kit.credentials, kit.options) as owner:
        owner._process.send_signal(signal.SIGSTOP)
        transfer = owner.read()
        owner.pump(lambda: owner.num_ended == 1)
        owner._process.send_signal(signal.SIGCONT)
        assert [event.transfer for event in owner.ended] == [transfer]
        assert isinstance(owner.ended[0], ReadCompleted)


def test_a_read_from_an_owner_that_stands_still_costs_little_and_ends_with_the_remote():
    """Nothing of it lands any more, also when the owner goes on."""
    kit = NetworkKit()
    with OwnerProcess(kit.make_side(SHAPES), kit.credentials, kit.options) as owner:
        owner._process.send_signal(signal.SIGSTOP)
        transfer = owner.read()
        before, began, num_polls = time.process_time(), time.monotonic(), 0
        while (elapsed_s := time.monotonic() - began) < 1.0 or num_polls <= 50:
            assert elapsed_s < 60, num_polls
            select.select([owner.reader.transport.readiness_fd], [], [], 1.0)
            owner.events += owner.reader.transport.poll()
            num_polls += 1
        assert num_polls < 2000 * elapsed_s
        assert time.process_time() - before < 0.5 * elapsed_s
        assert owner.num_ended == 0
        owner.reader.transport.detach(owner.remote)
        owner.pump(lambda: owner.num_ended == 1)
        at_the_end = owner.reader.snapshot()
        owner._process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        owner.reader.transport.poll()
        assert [event.transfer for event in owner.ended] == [transfer]
        assert isinstance(owner.ended[0], ReadFailed)
        assert owner.reader.snapshot() == at_the_end
        assert not any(isinstance(event, RemoteLost) for event in owner.events)


def test_a_second_transfer_of_the_same_shape_prepares_nothing(monkeypatch):
    pair = TransportPair.of(HostKit().make_side(), HostKit().make_side())
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
    rng = np.random.default_rng(1)
    for round_ in range(3):
        pages = rng.permutation(NUM_PAGES)
        check_write(pair, remote, grant, [whole_pages(pages, pages[::-1], PAGE_BYTES)])
        if round_ == 0:
            monkeypatch.setattr(Agent, "prepare", None)
    pair.close()


def test_reads_between_network_namespaces_and_over_a_cable_that_is_cut(namespace):
    key = Credentials.generate()
    with subprocess.Popen(
        [*namespace, sys.executable, "-c", OWNER, key.key.secret.hex(), "10.77.0.2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        descriptor = msgspec.json.decode(process.stdout.readline(), type=RegionDescriptor)
        assert descriptor.endpoint.startswith("10.77.0.2:")
        context = TransportContext(key, new_epoch(), "10.77.0.1", MachineClock())
        transport = TRANSPORTS.build("nixl", {"lanes": "network"})(context)
        reader = Side.start(transport, context.epoch, allocate_host_region([(1024, 65_536)]))
        events = []

        def pump(until):
            deadline = time.monotonic() + 30
            while not until():
                assert time.monotonic() < deadline, events
                select.select([transport.readiness_fd], [], [], 0.1)
                events.extend(transport.poll())

        remote = transport.attach(descriptor)
        pump(lambda: RemoteAttached(remote) in events)
        pages = np.random.default_rng(1).permutation(1024)
        copies = PageCopies(0, (whole_pages(pages, range(1024), 65_536),))
        read = PageRead(remote, reader.region.handle, copies)
        done = ReadCompleted(transport.read(read), copies.num_bytes)
        pump(lambda: done in events)
        theirs = np.random.default_rng(6).integers(0, 256, 1024 * 65_536, np.uint8)
        assert (reader.pages() == theirs.reshape(1024, 65_536)[pages]).all()
        subprocess.run(["ip", "link", "set", "baton-nixl0", "down"], check=True)
        cut = transport.read(read)
        for _ in range(300):
            events.extend(transport.poll())
            time.sleep(0.001)
        assert not any(isinstance(event, ReadFailed) for event in events)
        transport.detach(remote)
        pump(lambda: any(isinstance(event, ReadFailed) for event in events))
        assert [each.transfer for each in events if isinstance(each, ReadFailed)] == [cut]
        reader.close()
        process.kill()
