"""Faults of Ray's head: it is lost, or its GCS, which keeps Ray's state, ends and starts again."""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.ray.chaos_fleet import CALL_TIMEOUT_S, FLEET, wait_until
from tests.ray.chaos_injections import (
    EFFECT_TIMEOUT_S,
    READY_TIMEOUT_S,
    Injected,
    kill,
    supervisor_killed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.ray.chaos_fleet import ChaosFleet
    from tests.ray.hosts import IsolatedHost


@contextmanager
def head_lost(fleet: ChaosFleet) -> Iterator[Injected]:
    """Ray's head ends and does not come back."""
    pid = find_process("gcs_server", fleet.cluster.head.folder)
    kill(pid)
    _wait_until_refused(fleet)
    fleet.is_head_lost = True
    yield Injected(f"process {pid} is gone, and its port refuses connections")


@contextmanager
def gcs_restarted(fleet: ChaosFleet) -> Iterator[Injected]:
    """The head's GCS alone is killed, and started again with the same command."""
    head = fleet.cluster.head
    pid = find_process("gcs_server", head.folder)
    command, environment = _read_words(pid, "cmdline"), _read_words(pid, "environ")
    if not any(word.startswith("--redis_address=") for word in command):
        raise AssertionError("Ray's head keeps its state in its own memory")
    start = lambda: _run_apart(head, ["env", "-i", *environment, *command])  # noqa: E731
    with _restarted(fleet, [pid], start) as injected:
        yield injected


@contextmanager
def head_restarted(fleet: ChaosFleet) -> Iterator[Injected]:
    """All Ray processes of the head's host are killed, and `ray start --head` is called again."""
    head = fleet.cluster.head
    if ours := [each.name for each in fleet.list_processes() if each.host is head]:
        raise AssertionError(f"{ours} run on the head's host, and would end with its Ray")
    gcs = find_process("gcs_server", head.folder)
    others = set(find_processes(str(head.folder / "ray"), head.folder)) - {gcs}

    def start() -> None:
        starting = head.start_ray(head, *fleet.head_options)
        printed, _ = starting.communicate(timeout=READY_TIMEOUT_S)
        if starting.returncode:
            raise AssertionError(f"`ray start --head` fails the second time:\n{printed}")

    with _restarted(fleet, [gcs, *sorted(others)], start) as injected:
        yield injected


@contextmanager
def _restarted(fleet: ChaosFleet, pids: list[int], start: Callable[[], None]) -> Iterator[Injected]:
    """Kill processes of the head, its GCS first; some 20 s later `start` is called.

    Then everything that needs Ray's head is done: a supervisor is killed, which Ray has to start
    again, and a worker is added and removed.
    """
    before = _list_lives(fleet)
    for pid in pids:
        with suppress(ProcessLookupError):  # Ray's processes end with one another
            kill(pid)
    _wait_until_refused(fleet)
    killed_at = time.monotonic()
    # It takes 20 s: how long it tries to connect.
    status = fleet.call("status", "--on", "ray", "--fleet", FLEET)
    if status.returncode == 0 or "cannot connect to Ray" not in status.stderr:
        raise AssertionError(f"`baton status` without a head: {status.stdout}{status.stderr}")
    away_s = time.monotonic() - killed_at
    start()
    if wait_until(lambda: not _refuses(fleet), EFFECT_TIMEOUT_S) is None:
        raise AssertionError(f"the new GCS does not listen at {fleet.cluster.address}")
    knows_s = wait_until(lambda: _knows_all(fleet), READY_TIMEOUT_S)
    if knows_s is None:
        raise AssertionError("`baton status` does not show the fleet again")
    if (after := _list_lives(fleet)) != before:
        raise AssertionError(f"processes were started or ended: {before} became {after}")
    signs = [f"`baton status` shows the same processes {knows_s:.1f} s after the new start"]
    with supervisor_killed(fleet) as injected:
        proof = f"{len(pids)} processes were gone for {away_s:.1f} s; the port refused connections"
        yield Injected(f"{proof}; then {injected.proof}", injected.lost, signs=signs)
        for num_decode in (3, 2):
            fleet.command("scale", "--decode", str(num_decode))
            if wait_until(partial(_has_decode, fleet, num_decode), READY_TIMEOUT_S) is None:
                raise AssertionError(f"`baton scale --decode {num_decode}` has no effect")
        signs.append("`baton scale` adds a worker and removes it")


def _wait_until_refused(fleet: ChaosFleet) -> None:
    # The process is a zombie while its threads end; until the last one has, its sockets are open.
    if wait_until(lambda: _refuses(fleet), EFFECT_TIMEOUT_S) is None:
        raise AssertionError(f"Ray's head still accepts connections at {fleet.cluster.address}")


def _refuses(fleet: ChaosFleet) -> bool:
    host, _, port = fleet.cluster.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return True
    return False


def find_process(program: str, folder: Path) -> int:
    """The one process with a word in its command line, of the host with that folder."""
    found = find_processes(program, folder)
    if len(found) != 1:
        raise AssertionError(f"{len(found)} processes are {program!r}")
    return found[0]


def find_processes(word: str, folder: Path) -> list[int]:
    """Those with a word in their command line, of the host with that folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes()
            if word.encode() in line and f"{folder}/".encode() in line:
                found.append(int(path.parent.name))
    return found


def _read_words(pid: int, file: str) -> list[str]:
    return Path(f"/proc/{pid}/{file}").read_text().rstrip("\0").split("\0")


def _run_apart(host: IsolatedHost, command: list[str]) -> None:
    """Start a process on a host that nothing here is the parent of, as `ray start` does."""
    apart = ("sh", "-c", 'exec setsid --fork "$@" </dev/null >/dev/null 2>&1', "sh")
    done = host.run(*apart, *command, timeout_s=CALL_TIMEOUT_S)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)


def _list_lives(fleet: ChaosFleet) -> list[tuple[str, int, int]]:
    """Of each process of the fleet: its name, its id and its supervisor's."""
    return sorted((each.name, each.pid, each.supervisor_pid) for each in fleet.list_processes())


def _knows_all(fleet: ChaosFleet) -> bool:
    """Whether `baton status` names every process, ready."""
    try:
        members = fleet.status()
    except AssertionError:
        return False
    ready = sorted(name for name, member in members.items() if member.state == "ready")
    return ready == [name for name, _, _ in _list_lives(fleet)]


def _has_decode(fleet: ChaosFleet, num_workers: int) -> bool:
    return sum(each.role == "decode" for each in fleet.list_processes()) == num_workers
