"""What a test may see of a worker from outside: its metrics, its traces, and `/proc`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from baton.testing.fleet import FleetProcess

POLL_S = 0.05
"""What is polled, metrics for the most part, takes several milliseconds of processor time."""
TIMEOUT_S = 30.0
"""For what must come, where how soon is not the question: on however busy a machine."""
LISTEN = "0A"
ACCEPTS_CONNECTIONS = 0x10000


@dataclass(frozen=True)
class Load:
    """A worker's gauges at one instant. A cached block that nobody uses is free."""

    waiting: int
    running: int
    awaiting_kv: int
    free: int
    reserved: int
    quarantined: int
    capacity: int

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and every block is back."""
        return self.free == self.capacity and not (
            self.waiting or self.running or self.awaiting_kv or self.reserved or self.quarantined
        )


async def read_load(session: aiohttp.ClientSession, worker: FleetProcess) -> Load:
    samples = await read_samples(session, worker)
    inflight = "baton_worker_inflight_requests"
    blocks = "baton_worker_blocks"
    return Load(
        waiting=samples[inflight, "waiting"],
        running=samples[inflight, "running"],
        awaiting_kv=samples[inflight, "awaiting_kv"],
        free=samples[blocks, "free"],
        reserved=samples[blocks, "reserved"],
        quarantined=samples[blocks, "quarantined"],
        capacity=samples["baton_worker_blocks_capacity", ""],
    )


async def read_samples(
    session: aiohttp.ClientSession, process: FleetProcess
) -> dict[tuple[str, str], int]:
    """Samples by name and the value of their label `state` or `role` (or empty)."""
    async with session.get(f"{process.url}/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return {
        (sample.name, _pick_label(sample.labels)): int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def find_trace(
    session: aiohttp.ClientSession, worker: FleetProcess, request_id: str
) -> RequestSpan | None:
    """What a worker has recorded of a request so far; None if it has not met it."""
    async with session.get(f"{worker.url}/baton/v1/traces/{request_id}") as response:
        if response.status == 404:
            return None
        return msgspec.json.decode(await response.read(), type=RequestSpan)


async def read_summary(
    session: aiohttp.ClientSession, gateway: FleetProcess, request_id: str
) -> dict[str, object]:
    """The gateway's summary of one request."""
    async with session.get(f"{gateway.url}/debug/requests/{request_id}") as response:
        assert response.status == 200
        summary: dict[str, object] = (await response.json())["summary"]
        return summary


async def until(what: str, holds: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Poll until it holds; the seconds that this took."""
    begun = time.monotonic()
    while True:
        held = await holds()
        elapsed_s = time.monotonic() - begun
        if held and elapsed_s <= within_s:
            return elapsed_s
        assert elapsed_s <= within_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(POLL_S)


async def until_idle(
    session: aiohttp.ClientSession, *workers: FleetProcess, within_s: float
) -> float:
    """Until nothing is left of any request; the seconds that this took."""
    loads: dict[str, Load] = {}

    async def idle() -> bool:
        for worker in workers:
            loads[worker.name] = await read_load(session, worker)
        return all(load.is_idle for load in loads.values())

    try:
        return await until("idle", idle, within_s)
    except AssertionError as exc:
        raise AssertionError(f"not idle within {within_s} s: {loads}") from exc


async def until_mid_handoff(
    session: aiohttp.ClientSession, prefill: FleetProcess, decode: FleetProcess, request_id: str
) -> None:
    """Until some pages of a request were written, while others are not even computed."""

    async def under_way() -> bool:
        sent = await find_trace(session, prefill, request_id)
        if sent is None or sent.num_bytes == 0:
            return False
        assert Stamp.PREFILL_DONE not in sent.stamps, "too late: prefill is done"
        load = await read_load(session, decode)
        return load.awaiting_kv > 0 and load.reserved > 0

    await until("pages are written", under_way, TIMEOUT_S)


@dataclass(frozen=True)
class MappedPages:
    """What a process holds, but for the HTTP connections of whoever asks it.

    `descriptors` counts them by kind; `memories` are the shared memories mapped, by inode.
    """

    descriptors: tuple[tuple[str, int], ...]
    memories: frozenset[str]


def read_footprint(process: FleetProcess) -> MappedPages:
    http_port = urlsplit(process.url).port
    ports = {s.inode: s.local_port for s in read_tcp_sockets(process.pid)}
    unix = read_unix_inodes(process.pid)
    kinds: Counter[str] = Counter()
    for target in read_descriptors(process.pid):
        inode = _find_inode(target)
        if inode is None:
            kinds[re.sub(r"\d+", "#", target)] += 1
        elif inode in unix:
            kinds["unix"] += 1
        elif ports.get(inode, http_port) != http_port:  # unknown: closed while we looked
            kinds["tcp"] += 1
    return MappedPages(tuple(sorted(kinds.items())), read_memories(process.pid))


def read_descriptors(pid: int) -> list[str]:
    """What each open descriptor of a process refers to."""
    found: list[str] = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found


def _find_inode(descriptor: str) -> str | None:
    socket = re.fullmatch(r"socket:\[(\d+)\]", descriptor)
    return socket[1] if socket else None


def read_memories(pid: int) -> frozenset[str]:
    """Inodes of the memfds that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return frozenset(line.split()[4] for line in lines if "/memfd:" in line)


async def until_footprint(process: FleetProcess, expected: MappedPages, within_s: float) -> None:
    """Until a process holds just what is expected."""

    async def same() -> bool:
        return read_footprint(process) == expected

    try:
        await until("footprint", same, within_s)
    except AssertionError as exc:
        raise AssertionError(
            f"{process.name} holds {read_footprint(process)}, expected {expected}"
        ) from exc


@dataclass(frozen=True)
class TcpSocket:
    """A line of `/proc/net/tcp`."""

    local_port: int
    state: str
    inode: str


def read_tcp_sockets(pid: int) -> list[TcpSocket]:
    """All TCP sockets of a process' network namespace; which are its own, its inodes say."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [TcpSocket(int(words[1].partition(":")[2], 16), words[3], words[9]) for words in lines]


def read_unix_inodes(pid: int) -> frozenset[str]:
    lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    return frozenset(line.split()[6] for line in lines)


def read_own_inodes(pid: int) -> frozenset[str]:
    """Inodes of the sockets that a process has open."""
    inodes = (_find_inode(descriptor) for descriptor in read_descriptors(pid))
    return frozenset(inode for inode in inodes if inode is not None)


def read_listening_ports(pid: int) -> frozenset[int]:
    """TCP ports on which a process listens."""
    own = read_own_inodes(pid)
    return frozenset(
        s.local_port for s in read_tcp_sockets(pid) if s.state == LISTEN and s.inode in own
    )


def read_abstract_names(pid: int) -> list[str]:
    """Abstract Unix addresses on which a process listens, without the leading zero byte."""
    own = read_own_inodes(pid)
    return [name for inode, name in _read_listening_names(pid) if inode in own]


def read_all_abstract_names() -> frozenset[str]:
    """Abstract Unix addresses on which anybody listens."""
    return frozenset(name for _, name in _read_listening_names(os.getpid()))


def _read_listening_names(pid: int) -> list[tuple[str, str]]:
    words = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [
        (w[6], w[7].removeprefix("@"))
        for w in words
        if len(w) > 7 and w[7].startswith("@") and int(w[3], 16) & ACCEPTS_CONNECTIONS
    ]


def read_shm_files(pid: int) -> list[str]:
    """Files of `/dev/shm` that a process has mapped or open: they can outlive it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [text for text in (*read_descriptors(pid), *lines) if "/dev/shm/" in text]


def find_processes_of_sessions(sessions: set[int]) -> list[str]:
    """Command lines of processes, not yet reaped zombies apart, that belong to these sessions."""
    found: list[str] = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (proc / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                found.append((proc / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def is_stopped(process: FleetProcess) -> bool:
    """Whether the kernel says that it is stopped."""
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def read_rss_bytes(process: FleetProcess) -> int:
    """Resident memory that belongs to the process alone (shared pages are not counted)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def is_listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _pick_label(labels: dict[str, str]) -> str:
    return labels.get("state") or labels.get("role", "")
