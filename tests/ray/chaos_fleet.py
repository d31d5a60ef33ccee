"""A fleet on three hosts under Ray, as faults need it: its processes, who uses them, its commands.

One host has Ray's head, the gateway and the prefill worker (with Redis: the head alone); each of
the two others a decode worker.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.errors import PeerUnreachableError
from baton.launch.fleet import FleetMember, FleetStatus
from baton.launch.gateways import find_up, get
from baton.protocol.members import decode_members
from baton.testing.fleet import Fleet
from tests.chaos.process_state import read_listening_ports
from tests.greedy_load import GreedyLoad
from tests.ray.hosts import ray_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.ray.hosts import IsolatedHost, RayCluster

FLEET = "chaos"
LABELS = (
    {"rack": "r1", "host": "h1", "kind": "head"},
    {"rack": "r2", "host": "h2", "kind": "worker"},
    {"rack": "r3", "host": "h3", "kind": "worker"},
)
ROLES = Counter({"gateway": 1, "prefill": 1, "decode": 2})
ENGINE = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    # Room for a few prompts: each is prefilled and handed over again.
    "engine.num_blocks": 32,
}
SETTINGS = (
    *(f"{name}={value}" for name, value in ENGINE.items()),
    "router.policy=round_robin",  # every request is handed over
    'ray.gateway_labels=["kind=head"]',
    'ray.workers.prefill.labels=["kind=head"]',
    'ray.workers.decode.labels=["rack=in(r2,r3)"]',
    "ray.workers.decode.placement=spread",
)
APART_FROM_HEAD = ('ray.gateway_labels=["rack=r2"]', 'ray.workers.prefill.labels=["rack=r2"]')
PROMPTS = tuple(f"{word} by the sea, and those who lived in it, " * 6 for word in "ABCDEFGH")
NUM_CLIENTS = 2
MAX_TOKENS = 64
UP_TIMEOUT_S = 150.0
CALL_TIMEOUT_S = 60.0
POLL_S = 0.1
REDIS_PORT = 6390
AN_HOUR_S = 3600
"""As in clock_ahead.c."""
PROGRAMS = ("ip", "nsenter", "unshare", "tc", "mount", "cc", "redis-server")
COMMAND = re.compile(rf"ray-{FLEET}-((?:gateway|prefill|decode)-\d+)/settings\.toml")


def find_missing() -> list[str]:
    """What this machine lacks for three hosts, and how to get it."""
    missing = [] if os.geteuid() == 0 else ["root: run this command with sudo"]
    packages = {"ip": "iproute2", "tc": "iproute2", "cc": "gcc", "redis-server": "redis-server"}
    missing += [
        f"{program}: apt-get install {packages.get(program, 'util-linux')}"
        for program in PROGRAMS
        if shutil.which(program) is None
    ]
    if not (Path(sys.executable).parent / "ray").exists():
        missing.append("Ray: pip install 'ray>=2.60,<3' (make test-ray does)")
    return missing


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Seconds until it holds; None: not in time."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > timeout_s:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - begun


@dataclass(frozen=True)
class RayProcess:
    """One life of a process of the fleet. `url` is empty until a gateway's file has it.

    `begun_at` is when it was started, by this process's monotonic clock.
    """

    name: str
    pid: int
    host: IsolatedHost
    begun_at: float
    url: str = ""

    @property
    def role(self) -> str:
        """`gateway`, `prefill` or `decode`. Numbers change: `baton upgrade` starts new ones."""
        return self.name.partition("-")[0]

    @property
    def is_alive(self) -> bool:
        """Whether it runs. Its supervisor reaps it."""
        return Path(f"/proc/{self.pid}").exists()

    @property
    def supervisor_pid(self) -> int:
        """Of the Ray actor that started it."""
        return _read_stat(self.pid)[1]


def _read_stat(pid: int) -> tuple[str, int, float]:
    """Its state, its parent, and when it was started, in seconds of the monotonic clock."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(words[19]) / os.sysconf("SC_CLK_TCK")
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    return words[0], int(words[1]), time.monotonic() - ago_s


@dataclass
class StartTimes:
    """Seconds from the first `ray start`; `stages` of the fleet's are from the `baton up`."""

    ray_s: float = 0.0
    fleet_s: float = 0.0
    first_token_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


@dataclass
class ChaosFleet:
    """A fleet that serves. `known` are right answers, by prompt.

    `key_file` is the cluster key's on every host, if the fleet was started with one; `head_options`
    are further ones of the `ray start` of its head.
    """

    cluster: RayCluster
    url: str
    key: str
    known: dict[str, str] = field(default_factory=dict)
    start: StartTimes = field(default_factory=StartTimes)
    key_file: Path | None = None
    is_head_lost: bool = False
    head_options: tuple[str, ...] = ()
    _urls: dict[int, str] = field(default_factory=dict)

    def new_load(self) -> GreedyLoad:
        """Clients that have not asked yet."""
        load = GreedyLoad(self.url, PROMPTS, MAX_TOKENS, known=self.known, num_clients=NUM_CLIENTS)
        load.learn()
        return load

    @property
    def credentials(self) -> Credentials:
        """With which workers may be asked."""
        return Credentials.of(ClusterKey.from_hex(self.key))

    def list_processes(self) -> list[RayProcess]:
        """Every life of every process of the fleet, on all hosts."""
        hosts = {
            os.stat(f"/run/netns/{each.network.namespace}").st_ino: each  # noqa: PTH116
            for each in self.cluster.hosts
        }
        found: dict[int, RayProcess] = {}
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                match = COMMAND.search(path.read_text(errors="replace"))
                if match is None:
                    continue
                pid = int(path.parent.name)
                state, parents[pid], begun_at = _read_stat(pid)
                host = hosts.get((path.parent / "ns/net").stat().st_ino)
                if host is not None and state not in "ZX":
                    found[pid] = RayProcess(match[1], pid, host, begun_at)
        listed = self.read_members()
        return [
            self._with_url(each, listed) for pid, each in found.items() if parents[pid] not in found
        ]

    def _with_url(self, process: RayProcess, listed: frozenset[str]) -> RayProcess:
        if process.role == "gateway":
            self._urls[process.pid] = self.url
        elif process.pid not in self._urls:
            with suppress(OSError):
                ports = read_listening_ports(process.pid)
                for url in listed:
                    parts = urlsplit(url)
                    if parts.hostname == process.host.address and parts.port in ports:
                        self._urls[process.pid] = url
        url = self._urls.get(process.pid, "")
        return RayProcess(process.name, process.pid, process.host, process.begun_at, url)

    def read_members(self) -> frozenset[str]:
        """The workers' addresses that the gateway's supervisor has written."""
        name = f"baton/ray-{FLEET}-gateway-0/members.json"
        paths = [each.folder / name for each in self.cluster.hosts]
        found = next((path for path in paths if path.exists()), paths[0])
        return frozenset(each.url for each in decode_members(found.read_bytes()).workers)

    def find(self, name: str) -> RayProcess:
        """The only life of a process."""
        found = [each for each in self.list_processes() if each.name == name]
        if len(found) != 1:
            raise AssertionError(f"{name} has {len(found)} lives")
        return found[0]

    def find_worker_on(self, host: IsolatedHost) -> RayProcess:
        """Any worker of a host."""
        found = [each for each in self.list_processes() if each.host is host and each.url]
        if not found:
            raise AssertionError(f"no worker is on {host.address}")
        return found[0]

    def find_up(self) -> frozenset[str]:
        """The addresses of workers to which the gateway gives requests; none if it is away."""
        try:
            return find_up(get(self.url, "/metrics"))
        except PeerUnreachableError:
            return frozenset()

    def is_whole(self, lost: frozenset[int] = frozenset()) -> bool:
        """Whether the gateway uses all workers that there should be, in lives that are not lost."""
        up, alive = self.find_up(), self.list_processes()
        good = [each for each in alive if each.pid not in lost and each.url in {*up, self.url}]
        return Counter(each.role for each in good) == ROLES and len(up) == len(good) - 1

    def call(
        self, *words: str, host: IsolatedHost | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One of `baton`'s commands, on a host (the head's, if none is named)."""
        return (host or self.cluster.head).run(
            sys.executable, "-m", "baton.cli", *words, timeout_s=UP_TIMEOUT_S
        )

    def command(self, *words: str) -> str:
        """What a command about this fleet prints.

        Raises:
            AssertionError: it fails.
        """
        done = self.call(*words, "--on", "ray", "--fleet", FLEET)
        if done.returncode:
            raise AssertionError(done.stdout + done.stderr)
        return done.stdout

    def status(self) -> dict[str, FleetMember]:
        """What `baton status` reports."""
        members = msgspec.json.decode(self.command("status", "--json"), type=FleetStatus).members
        return {member.name: member for member in members}

    def logs(self, name: str) -> str:
        """What `baton logs` prints."""
        return self.command("logs", name, "--lines", "60")


def ask_colocated_server(folder: Path) -> dict[str, str]:
    """Each prompt's greedy answer by one worker that does both, to which nothing happens."""
    with Fleet(folder, dict(os.environ)) as fleet:
        worker = fleet.start_worker("colocated", "both", ENGINE).wait_ready()
        gateway = fleet.start_gateway([], [], both=[worker])
        load = GreedyLoad(gateway.url, PROMPTS, MAX_TOKENS)
        load.learn()
        fleet.stop()
    return load.known


@contextmanager
def chaos_fleet(
    known: dict[str, str], *, has_clock_ahead: bool = False, has_redis: bool = False
) -> Iterator[ChaosFleet]:
    """Hosts, Ray and a fleet, started anew.

    `has_clock_ahead`: the last host's is. `has_redis`: Ray's head keeps its state there, and
    nothing of the fleet runs on its host.

    Raises:
        NoNamespaceError: this user cannot make namespaces here.
        AssertionError: Ray or the fleet does not start; what it printed is in the message.
    """
    with ray_cluster(LABELS) as cluster:
        folder = cluster.head.folder.parent
        key, key_file = secrets.token_hex(32), folder / "cluster.key"
        key_file.touch(0o600)
        key_file.write_text(key)
        last = cluster.hosts[-1]
        limited_disk(last)
        if has_clock_ahead:
            last.environment["LD_PRELOAD"] = str(build_clock(folder))
        for host in cluster.hosts:
            host.environment["RAY_ADDRESS"] = cluster.address
        begun = time.monotonic()
        head_options = start_redis(cluster.head) if has_redis else ()
        cluster.start_ray(*head_options)
        start = StartTimes(ray_s=time.monotonic() - begun)
        fleet = ChaosFleet(cluster, "", key, known, start, key_file, head_options=head_options)
        _start_processes(fleet, APART_FROM_HEAD if has_redis else ())
        load = fleet.new_load()
        start.first_token_s = start.ray_s + start.fleet_s + load.first_token_s
        yield fleet


def build_clock(folder: Path) -> Path:
    """A library that, preloaded, sets the clock of Baton's workers ahead."""
    library = folder / "clock_ahead.so"
    source = Path(__file__).with_name("clock_ahead.c")
    command = ("cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(source))
    subprocess.run(command, check=True)
    return library


def start_redis(host: IsolatedHost) -> tuple[str, ...]:
    """Start Redis on the head's host; its `ray start` needs the options that are returned."""
    folder, password = host.folder / "redis", secrets.token_hex(16)
    folder.mkdir()
    settings = folder / "redis.conf"
    settings.touch(0o600)
    settings.write_text(
        f"bind 127.0.0.1\nport {REDIS_PORT}\nrequirepass {password}\ndir {folder}\n"
        f"appendonly yes\ndaemonize yes\nlogfile {folder / 'log'}\n"
    )
    done = host.run("redis-server", str(settings), timeout_s=CALL_TIMEOUT_S)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    host.environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{REDIS_PORT}"
    return (f"--redis-password={password}",)


def limited_disk(host: IsolatedHost) -> None:
    """The host's files are on a disk of its own, which is full before this machine's is."""
    done = host.run(
        *("mount", "-t", "tmpfs", "-o", "size=192m,mode=700", "tmpfs", str(host.folder)),
        timeout_s=CALL_TIMEOUT_S,
    )
    if done.returncode:
        raise AssertionError(done.stderr)


def up_words(fleet: str, *settings: str) -> tuple[str, ...]:
    """The arguments of `baton up`."""
    words = [word for setting in settings for word in ("--set", setting)]
    return ("up", "--on", "ray", "--fleet", fleet, "--decode", "2", "--insecure", *words)


def _start_processes(fleet: ChaosFleet, settings: tuple[str, ...]) -> None:
    begun = time.monotonic()
    key_file = f"cluster.key_file={fleet.key_file}"
    done = fleet.call(*up_words(FLEET, key_file, *SETTINGS, *settings))
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    fleet.start.fleet_s = time.monotonic() - begun
    fleet.url = next(word for word in done.stdout.split() if word.startswith("http://"))
    for each in fleet.list_processes():
        supervisor_at = _read_stat(each.supervisor_pid)[2]
        fleet.start.stages[f"{each.name}: supervisor"] = supervisor_at - begun
        fleet.start.stages[f"{each.name}: process"] = each.begun_at - begun
    now = time.monotonic()
    for name, member in fleet.status().items():
        if member.up_s is not None:
            fleet.start.stages[f"{name}: ready"] = now - begun - member.up_s
