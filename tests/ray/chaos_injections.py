"""What is done to a fleet on three hosts, and the proof that it was done.

Each is a context manager: the fault has happened, and is proven, where it yields; what can be
undone is undone where the block ends.
"""

from __future__ import annotations

import email.utils
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from baton.handoff import messages
from baton.net.tls import ClusterTls
from baton.testing.network_namespaces import run
from tests.ray.chaos_fleet import (
    AN_HOUR_S,
    CALL_TIMEOUT_S,
    FLEET,
    ChaosFleet,
    RayProcess,
    up_words,
    wait_until,
)

if TYPE_CHECKING:
    from tests.ray.hosts import IsolatedHost

VICTIM = "decode-1"
EFFECT_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 60.0
RATE_BITS = 1_000_000
PROBE_BYTES = 256 << 10
CLOCK_MARGIN_S = 60.0


@dataclass
class Injected:
    """What was done. `lost` are processes that are over, or no longer the fleet's.

    `old` is a life that goes on although another one follows it: nothing may ask it any more.
    `signs` are lines that an operator sees.
    """

    proof: str
    lost: frozenset[int] = frozenset()
    old: tuple[RayProcess, ...] = ()
    signs: list[str] = field(default_factory=list)


Inject: TypeAlias = Callable[[ChaosFleet], AbstractContextManager[Injected]]


# Processes ---------------------------------------------------------------------------------------


def kill(pid: int) -> None:
    """SIGKILL, and wait until the kernel has no such process any more.

    Raises:
        AssertionError: it is still there.
    """
    os.kill(pid, signal.SIGKILL)
    if wait_until(lambda: not _runs(pid), EFFECT_TIMEOUT_S) is None:
        raise AssertionError(f"process {pid} outlives SIGKILL")


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def killed(name: str) -> Inject:
    """SIGKILL of a process; its supervisor starts it again."""

    @contextmanager
    def inject(fleet: ChaosFleet) -> Iterator[Injected]:
        process = fleet.find(name)
        kill(process.pid)
        yield Injected(f"process {process.pid} is gone", frozenset({process.pid}))

    return inject


def stopped(name: str) -> Inject:
    """SIGSTOP of a process, and SIGCONT."""

    @contextmanager
    def inject(fleet: ChaosFleet) -> Iterator[Injected]:
        pid = fleet.find(name).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            state = lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: E731
            if wait_until(lambda: state() == "T", EFFECT_TIMEOUT_S) is None:
                raise AssertionError(f"process {pid} does not stop")
            yield Injected(f"process {pid} is in state T")
            if state() != "T":
                raise AssertionError(f"process {pid} was not stopped all the time")
        finally:
            os.kill(pid, signal.SIGCONT)

    return inject


@contextmanager
def supervisor_killed(fleet: ChaosFleet) -> Iterator[Injected]:
    """SIGKILL of a Ray actor: its worker ends with it, and Ray starts it again."""
    process = fleet.find(VICTIM)
    supervisor = process.supervisor_pid
    kill(supervisor)
    if wait_until(lambda: not _runs(process.pid), EFFECT_TIMEOUT_S) is None:
        raise AssertionError(f"the worker {process.pid} outlives its supervisor {supervisor}")
    lost = frozenset({process.pid, supervisor})
    yield Injected(f"actor {supervisor} is gone, and its worker {process.pid} with it", lost)


# The network -------------------------------------------------------------------------------------


@contextmanager
def slow_links(fleet: ChaosFleet) -> Iterator[Injected]:
    """What the head's host and the victim's send is slowed to 1 Mbit/s."""
    hosts = (fleet.cluster.head, fleet.find(VICTIM).host)
    limit = ("tbf", "rate", f"{RATE_BITS}bit", "burst", "16kb", "latency", "400ms")
    device = ("dev", "eth0", "root")
    try:
        for host in hosts:
            run("tc", "-n", host.network.namespace, "qdisc", "replace", *device, *limit)
        took_s = [_time_to_send(host) for host in hosts]
        least_s = PROBE_BYTES * 8 / RATE_BITS
        if min(took_s) < least_s / 2:
            raise AssertionError(f"{PROBE_BYTES} bytes took only {min(took_s):.2f} s")
        yield Injected(f"{PROBE_BYTES >> 10} KiB take {min(took_s):.1f} s to leave each host")
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                run("tc", "-n", host.network.namespace, "qdisc", "del", *device)


def _time_to_send(host: IsolatedHost) -> float:
    """Seconds in which bytes of a host arrive here."""
    bridge = host.address.rpartition(".")[0] + ".1"
    code = (
        "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10);"
        "s.sendall(bytes(int(sys.argv[3])))"
    )
    with socket.create_server((bridge, 0)) as listener:
        listener.settimeout(EFFECT_TIMEOUT_S)
        port = str(listener.getsockname()[1])
        sending = host.start(sys.executable, "-c", code, bridge, port, str(PROBE_BYTES))
        connection, _ = listener.accept()
        begun, num_bytes = time.monotonic(), 0
        with connection:
            connection.settimeout(EFFECT_TIMEOUT_S)
            while part := connection.recv(1 << 16):
                num_bytes += len(part)
        took_s = time.monotonic() - begun
        printed, _ = sending.communicate(timeout=EFFECT_TIMEOUT_S)
    if num_bytes != PROBE_BYTES:
        raise AssertionError(f"{num_bytes} bytes of {PROBE_BYTES} arrived: {printed}")
    return took_s


def partition(*, both_ways: bool) -> Inject:
    """The victim's host is cut off from the others, not from this process."""

    @contextmanager
    def inject(fleet: ChaosFleet) -> Iterator[Injected]:
        victim = fleet.find(VICTIM)
        with fleet.cluster.partitioned(victim.host, both_ways=both_ways):
            # Proved inside: a datagram that should not arrive did not.
            proof = f"no datagram of {victim.host.address} arrives at the other hosts"
            proof += ", and none of theirs there" if both_ways else ""
            lost = [each for each in fleet.list_processes() if each.host is victim.host]
            yield Injected(proof, frozenset(each.pid for each in lost), tuple(lost))

    return inject


@contextmanager
def host_killed(fleet: ChaosFleet) -> Iterator[Injected]:
    """A host loses power."""
    host = fleet.find(VICTIM).host
    lost = frozenset(each.pid for each in fleet.list_processes() if each.host is host)
    host.cut_power()
    if left := [pid for pid in lost if _runs(pid)]:
        raise AssertionError(f"processes {left} outlive their host")
    yield Injected(f"all processes of {host.address} are gone, {len(lost)} of the fleet's", lost)


# What a host has ---------------------------------------------------------------------------------


@contextmanager
def disk_full(fleet: ChaosFleet) -> Iterator[Injected]:
    """The disk of the last host fills, and then its supervisor is killed."""
    host = fleet.cluster.hosts[-1]
    victim = fleet.find_worker_on(host)
    file, probe = host.folder / "filling", host.folder / "probe"
    try:
        host.run("dd", "if=/dev/zero", f"of={file}", "bs=64k", timeout_s=CALL_TIMEOUT_S)
        tried = host.run("dd", "if=/dev/zero", f"of={probe}", "bs=64k", "count=1", timeout_s=5.0)
        if "No space left on device" not in tried.stderr:
            raise AssertionError(f"the disk has room: {tried.stderr}")
        supervisor = victim.supervisor_pid
        kill(supervisor)
        lost = frozenset({victim.pid, supervisor})
        yield Injected("a write fails: No space left on device", lost)
    finally:
        host.run("rm", "-f", str(file), str(probe), timeout_s=CALL_TIMEOUT_S)


@contextmanager
def clock_ahead(fleet: ChaosFleet) -> Iterator[Injected]:
    """The clock of the last host is an hour ahead, from its start; its worker is killed."""
    victim = fleet.find_worker_on(fleet.cluster.hosts[-1])
    ahead_s = _read_clock(fleet, victim) - time.time()
    if abs(ahead_s - AN_HOUR_S) > CLOCK_MARGIN_S:
        raise AssertionError(f"the clock of {victim.name} is {ahead_s:.0f} s ahead")
    kill(victim.pid)
    yield Injected(f"{victim.name} dates an answer {ahead_s:.0f} s ahead", frozenset({victim.pid}))


def _read_clock(fleet: ChaosFleet, worker: RayProcess) -> float:
    """What a worker's wall clock shows: by the date of an answer."""
    parts = urlsplit(worker.url)
    context = ClusterTls(fleet.credentials).dialing
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=CALL_TIMEOUT_S, context=context
    )
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    finally:
        connection.close()


@contextmanager
def key_wrong(fleet: ChaosFleet) -> Iterator[Injected]:
    """The victim's host gets the key file of another cluster, and its worker starts again."""
    victim = fleet.find(VICTIM)
    if fleet.key_file is None:
        raise AssertionError("this fleet was started without a key file")
    other = fleet.key_file.with_name("other.key")
    other.touch(0o600)
    other.write_text(fleet.key[::-1])
    with bound_over(victim.host, other, fleet.key_file):
        read = victim.host.run("cat", str(fleet.key_file), timeout_s=CALL_TIMEOUT_S).stdout
        if read.strip() == fleet.key:
            raise AssertionError(f"{victim.host.address} still has the key")
        kill(victim.pid)
        injected = Injected("the host reads another key", frozenset({victim.pid}))
        ready = wait_until(lambda: _is_ready(fleet, victim), READY_TIMEOUT_S)
        if ready is None:
            raise AssertionError(f"{VICTIM} does not start with another key")
        yield injected
        second = fleet.find(VICTIM)
        if victim.url in fleet.find_up():
            raise AssertionError("the gateway uses a worker of another key")
        injected.signs += _lines_with(fleet.logs("gateway-0"), VICTIM)
    kill(second.pid)
    injected.lost |= {second.pid}


def _is_ready(fleet: ChaosFleet, before: RayProcess) -> bool:
    """Whether a life after this one has opened its port."""
    parts = urlsplit(before.url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), 1.0).close()
    except OSError:
        return False
    return all(each.pid != before.pid for each in fleet.list_processes())


@contextmanager
def version_differs(fleet: ChaosFleet) -> Iterator[Injected]:
    """The victim's host gets Baton with another handoff protocol, and its worker starts again."""
    victim = fleet.find(VICTIM)
    original = Path(messages.__file__)
    ours, theirs = messages.PROTOCOL_VERSION, messages.PROTOCOL_VERSION + 1
    line = "PROTOCOL_VERSION: Final = {}"
    folder = fleet.cluster.head.folder.parent
    changed = folder / "messages.py"
    text = original.read_text("utf-8")
    changed.write_text(text.replace(line.format(ours), line.format(theirs)), "utf-8")
    show = "from baton.handoff.messages import PROTOCOL_VERSION as v; print(v)"
    with bound_over(victim.host, changed, original):  # compiled files go by the source's time
        shown = victim.host.run(sys.executable, "-c", show, timeout_s=CALL_TIMEOUT_S).stdout
        if shown.strip() != str(theirs):
            raise AssertionError(f"the host has version {shown!r}")
        kill(victim.pid)
        injected = Injected(
            f"the host has handoff protocol {theirs}, the others {ours}", frozenset({victim.pid})
        )
        yield injected
        for name in (VICTIM, "prefill-0"):
            injected.signs += _lines_with(fleet.logs(name), "handoff protocol")
        second = fleet.find(VICTIM)
    kill(second.pid)
    injected.lost |= {second.pid}


def _lines_with(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line][-2:]


@contextmanager
def bound_over(host: IsolatedHost, source: Path, target: Path) -> Iterator[None]:
    """On one host, a file or a folder is in the place of another one."""
    done = host.run("mount", "--bind", str(source), str(target), timeout_s=CALL_TIMEOUT_S)
    if done.returncode:
        raise AssertionError(done.stderr)
    try:
        yield
    finally:
        host.run("umount", "--lazy", str(target), timeout_s=CALL_TIMEOUT_S)


# Commands ----------------------------------------------------------------------------------------


@contextmanager
def same_name(fleet: ChaosFleet) -> Iterator[Injected]:
    """A fleet of the same name is started; then two of one name at once, which find no hosts."""
    other = fleet.cluster.hosts[1]
    second = fleet.call(*up_words(FLEET), host=other)
    if second.returncode != 2 or "runs already" not in second.stderr:
        raise AssertionError(f"{second.returncode}: {second.stdout}{second.stderr}")
    nowhere = '["rack=r9"]'
    labels = ("gateway_labels", "workers.prefill.labels", "workers.decode.labels")
    settings = (f"ray.{name}={nowhere}" for name in labels)
    words = up_words("twins", "ray.timeout_s=8", *settings)
    command = (sys.executable, "-m", "baton.cli", *words)
    twins = [host.start(*command) for host in (fleet.cluster.head, other)]
    printed = [twin.communicate(timeout=CALL_TIMEOUT_S)[0] for twin in twins]
    codes = sorted(twin.returncode for twin in twins)
    named = ["runs already" in text for text in printed]
    unplaced = ["found no host" in text for text in printed]
    if codes != [1, 2] or sorted(named) != [False, True] or sorted(unplaced) != [False, True]:
        raise AssertionError(f"two at once: {codes}\n" + "\n---\n".join(printed))
    signs = [line for line in second.stderr.splitlines() if "runs already" in line]
    yield Injected("the second one is refused (exit code 2); of two at once, one", signs=signs)


@contextmanager
def upgraded(fleet: ChaosFleet) -> Iterator[Injected]:
    """`baton upgrade`: each process is replaced."""
    before = fleet.list_processes()
    printed = fleet.command("upgrade")
    if left := [each.name for each in before if _runs(each.pid)]:
        raise AssertionError(f"{left} were not replaced\n{printed}")
    yield Injected("no process of before runs", frozenset(each.pid for each in before))
