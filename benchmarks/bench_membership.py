"""Membership of many workers at many gateways: CPU, memory, and how soon an end is known.

`python benchmarks/bench_membership.py` runs three parts and prints a table (`--json FILE` keeps the
figures, `--table FILE` prints those of a file again):

simulation  1,000 workers and 20 gateways in one process and in virtual time: the production
            lease tables, fences, encodings and signatures; messages are delivered at once. CPU time
            of what a gateway does, by kind of work. In a second run a part of the workers reaches
            only one gateway (`--unreached`), so that exchanges have something to relay.
listener    one gateway's real listener with a real TLS connection for each of `--connections`
            workers, in a process of its own: CPU seconds for each announcement, and memory. What a
            fleet of 1,000 costs is that times its announcements a second.
death       real listeners: from the end of a worker until a gateway has taken it out, killed (its
            address refuses) and silent (its address answers nothing).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import resource
import socket
import statistics
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from baton.auth.certificates import IdentityRole
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant, MachineClock
from baton.gateway.members.announced import SWEEP_S
from baton.gateway.members.gossip import INTERVAL_S as GOSSIP_INTERVAL_S
from baton.gateway.members.gossip import NUM_PEERS
from baton.gateway.members.lease_table import MIN_INTERVAL_S, LeaseTable
from baton.gateway.members.listener import open_announcements
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.ids import WorkerId, new_epoch
from baton.net.cluster_client import ClusterClient
from baton.net.tls import ClusterTls
from baton.protocol.announcements import (
    ANNOUNCEMENTS_PATH,
    RENEWALS_PER_LEASE,
    Announcement,
    AnnouncementReply,
    Exchange,
    ExchangeReply,
    read_announcement,
    seal_announcement,
)
from baton.protocol.worker_http import Role
from baton.worker.fence import MembershipFence, Standing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from baton.gateway.members.announced import AnnouncedWorkers

KEY = ClusterKey(b"m" * 32)
STATIC = (WorkerAddress("https://127.0.0.1:1", Role.BOTH),)
MIB = 1 << 20


@dataclass
class Simulation:
    """Of one gateway, the mean of all: shares of a core by kind of work, in virtual time."""

    num_workers: int
    num_gateways: int
    lease_s: float
    unreached_share: float
    simulated_s: float
    announcements_per_s: float = 0.0
    relayed_per_s: float = 0.0
    direct_share: float = 0.0
    relayed_share: float = 0.0
    exchange_share: float = 0.0
    sweep_share: float = 0.0
    gateway_mib: float = 0.0
    learned_all_s: float = 0.0
    num_false_ends: int = 0
    num_fenced: int = 0

    @property
    def total_share(self) -> float:
        """All that was measured."""
        return self.direct_share + self.relayed_share + self.exchange_share + self.sweep_share


@dataclass
class SimulatedWorker:
    """One worker: its credentials are its own, as each process's are."""

    template: Announcement
    credentials: Credentials
    reached: list[int]
    fence: MembershipFence
    next_at: float
    sequence: int = 0


@dataclass
class Cpu:
    """Thread CPU time of all gateways by kind of work."""

    spent_s: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def spent_on(self, kind: str) -> Iterator[None]:
        """Count the block."""
        began = time.thread_time()
        yield
        self.spent_s[kind] = self.spent_s.get(kind, 0.0) + time.thread_time() - began


class SimulatedFleet:
    """Gateways and workers in virtual time; `now` is true for all of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rng, self.cpu = args, random.Random(18), Cpu()
        self.credentials = Credentials.of(KEY)
        tracemalloc.start()
        self.tables = [LeaseTable() for _ in range(args.gateways)]
        self.now = 0.0
        self.num_direct = self.num_relayed = self.num_false_ends = 0
        self.workers = [self._make_worker(number) for number in range(args.workers)]
        self.reply = msgspec.msgpack.Decoder(AnnouncementReply)
        self.exchange, self.answer = (msgspec.msgpack.Decoder(t) for t in (Exchange, ExchangeReply))

    def _make_worker(self, number: int) -> SimulatedWorker:
        lease_s, num_gateways = self.args.lease, self.args.gateways
        is_unreached = number < self.args.unreached * self.args.workers
        reached = [number % num_gateways] if is_unreached else list(range(num_gateways))
        template = Announcement(
            worker=WorkerId(f"worker-{number}"),
            epoch=new_epoch(),
            url=f"https://10.{number >> 8}.{number & 255}.1:8100",
            role=Role.DECODE,
            lease_s=lease_s,
            sequence=1,
            topology=f"zone-a/rack-{number % 20}/host-{number}",
        )
        start_s = self.rng.uniform(0, lease_s / RENEWALS_PER_LEASE)
        return SimulatedWorker(
            template, Credentials.of(KEY), reached, MembershipFence(lease_s), start_s
        )

    def run(self, until_s: float) -> None:
        """Go on to a time, in steps of a sweep."""
        while self.now < until_s:
            self.now += SWEEP_S
            for worker in self.workers:
                if worker.next_at <= self.now:
                    self.announce(worker)
            for number, table in enumerate(self.tables):
                with self.cpu.spent_on("sweep"):
                    lapsed = table.lapse(Instant(self.now))
                    table.take_overdue(Instant(self.now))
                self.num_false_ends += len(lapsed)
                if int(self.now / GOSSIP_INTERVAL_S + number / len(self.tables)) != int(
                    (self.now - SWEEP_S) / GOSSIP_INTERVAL_S + number / len(self.tables)
                ):
                    others = [other for other in range(len(self.tables)) if other != number]
                    for peer in self.rng.sample(others, min(NUM_PEERS, len(others))):
                        self.exchange_between(number, peer)

    def announce(self, worker: SimulatedWorker) -> None:
        """Sign once, deliver to every gateway that the worker reaches."""
        worker.next_at += worker.template.lease_s / RENEWALS_PER_LEASE
        worker.sequence += 1
        announcement = msgspec.structs.replace(worker.template, sequence=worker.sequence)
        sealed = seal_announcement(announcement, worker.credentials)
        worker.fence.sent(worker.sequence, Instant(self.now))
        sender = worker.credentials.signer.certificate
        for number in worker.reached:
            with self.cpu.spent_on("direct"):
                read = read_announcement(sealed, self.credentials, sender)
                verdict = self.tables[number].offer(read, sealed, Instant(self.now))
                body = msgspec.msgpack.encode(AnnouncementReply(result="accepted"))
            assert verdict.outcome == "accepted", verdict
            assert self.reply.decode(body).result == "accepted"
            self.num_direct += 1
        worker.fence.accepted(worker.sequence, Instant(self.now))

    def exchange_between(self, asking: int, asked: int) -> None:
        """One exchange, all of whose work is counted (both are gateways)."""
        with self.cpu.spent_on("exchange"):
            body = msgspec.msgpack.encode(Exchange(known=self.tables[asking].known()))
            known = self.exchange.decode(body).known or ()
            relayed, wanted = self.tables[asked].compare(known, Instant(self.now))
            reply = ExchangeReply(relayed=tuple(relayed), wanted=tuple(wanted))
            read = self.answer.decode(msgspec.msgpack.encode(reply))
            answers = self.tables[asking].relay(read.wanted, Instant(self.now))
        for table, received in ((asking, read.relayed), (asked, answers)):
            for each in received:
                with self.cpu.spent_on("relayed"):
                    announcement = read_announcement(each.sealed, self.credentials)
                    self.tables[table].offer(
                        announcement, each.sealed, Instant(self.now), each.age_s
                    )
                self.num_relayed += 1

    def learn(self) -> float:
        """A gateway that starts: seconds, of CPU too, until it knows all that a peer knows."""
        began, table = time.perf_counter(), LeaseTable()
        self.tables.append(table)
        while len(table) < len(self.tables[0]):
            before = len(table)
            self.exchange_between(len(self.tables) - 1, 0)
            assert len(table) > before, "an exchange has brought nothing"
        self.tables.pop()
        return time.perf_counter() - began


def simulate(args: argparse.Namespace) -> Simulation:
    """The part `simulation`."""
    fleet = SimulatedFleet(args)
    warm_up_s = 2 * args.lease
    fleet.run(warm_up_s)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    learned_s = fleet.learn()
    result = Simulation(args.workers, args.gateways, args.lease, args.unreached, args.simulated_s)
    fleet.cpu.spent_s.clear()
    fleet.num_direct = fleet.num_relayed = fleet.num_false_ends = 0
    fleet.run(warm_up_s + args.simulated_s)
    of_gateway_s = args.simulated_s * args.gateways
    result.announcements_per_s = fleet.num_direct / of_gateway_s
    result.relayed_per_s = fleet.num_relayed / of_gateway_s
    for kind, spent_s in fleet.cpu.spent_s.items():
        setattr(result, f"{kind}_share", spent_s / of_gateway_s)
    result.gateway_mib = size / MIB / args.gateways
    result.learned_all_s = learned_s
    result.num_false_ends = fleet.num_false_ends
    result.num_fenced = sum(
        worker.fence.look(Instant(fleet.now)) is not Standing.SERVING for worker in fleet.workers
    )
    return result


@dataclass
class Listener:
    """One real listener under load."""

    num_connections: int
    num_announcements: int
    cpu_us: float
    """Of the gateway's process, user and system, for each announcement."""
    rss_mib: float
    """The process at its end, and `base_mib` before the first connection."""
    base_mib: float
    share_of_1000: float
    """Of a core, for 1,000 workers that announce themselves each lease / 3."""


def serve(pipe: Connection, port: int) -> None:
    """A process with a listener: reports CPU time and memory when asked, ends at None."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe, port))


async def _serve(pipe: Connection, port: int) -> None:
    options = GatewayOptions(
        workers=STATIC,
        members=("announced",),
        credentials=Credentials.of(KEY),
        key_origin="configured",
        announce_port=port,
    )
    async with open_announcements(options, MachineClock(), CollectorRegistry()):
        pipe.send("ready")
        while True:
            question = await asyncio.to_thread(pipe.recv)
            if question is None:
                return
            usage = resource.getrusage(resource.RUSAGE_SELF)
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            pipe.send((usage.ru_utime + usage.ru_stime, rss / MIB))


async def load(
    pipe: Connection, port: int, num_connections: int, num_rounds: int, lease_s: float
) -> Listener:
    """Announce many workers over a connection each, in turn, as fast as it goes."""
    credentials = Credentials.of(KEY)
    tls = ClusterTls(credentials)
    pipe.send("usage")
    _, base_mib = pipe.recv()
    clients, templates = [], []
    for number in range(num_connections):
        client = ClusterClient(
            f"https://127.0.0.1:{port}", IdentityRole.GATEWAY, tls, max_answer_bytes=1 << 16
        )
        clients.append(client)
        templates.append(
            Announcement(
                worker=WorkerId(f"worker-{number}"),
                epoch=new_epoch(),
                url=f"https://10.{number >> 8}.{number & 255}.1:8100",
                role=Role.DECODE,
                lease_s=600.0,
                sequence=1,
            )
        )

    async def announce(number: int, sequence: int) -> None:
        announcement = msgspec.structs.replace(templates[number], sequence=sequence)
        sealed = seal_announcement(announcement, credentials)
        body = await clients[number].post(ANNOUNCEMENTS_PATH, sealed, 30.0)
        assert msgspec.msgpack.decode(body, type=AnnouncementReply).result == "accepted", body

    for number in range(num_connections):  # the TLS handshakes
        await announce(number, 1)
    pipe.send("usage")
    before_s, _ = pipe.recv()
    for sequence in range(2, 2 + num_rounds):
        await asyncio.sleep(MIN_INTERVAL_S)
        for first in range(0, num_connections, 16):
            group = range(first, min(first + 16, num_connections))
            await asyncio.gather(*(announce(number, sequence) for number in group))
    pipe.send("usage")
    after_s, rss_mib = pipe.recv()
    for client in clients:
        client.close()
    num_announcements = num_rounds * num_connections
    cpu_s = (after_s - before_s) / num_announcements
    share = cpu_s * 1000 * RENEWALS_PER_LEASE / lease_s
    return Listener(num_connections, num_announcements, cpu_s * 1e6, rss_mib, base_mib, share)


def measure_listener(args: argparse.Namespace) -> Listener:
    """The part `listener`."""
    port = free_port()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, port))
    process.start()
    try:
        assert here.recv() == "ready"
        return asyncio.run(load(here, port, args.connections, args.rounds, args.lease))
    finally:
        here.send(None)
        process.join(10)


@dataclass
class Deaths:
    """Seconds from a worker's last announcement until a gateway has taken it out, medians."""

    lease_s: float
    killed_s: float
    silent_s: float
    num_trials: int


async def measure_deaths(args: argparse.Namespace) -> Deaths:
    """The part `death`: several workers at once, which end at random moments between renewals."""
    port = free_port()
    options = GatewayOptions(
        workers=STATIC,
        members=("announced",),
        credentials=Credentials.of(KEY),
        key_origin="configured",
        announce_port=port,
    )
    async with open_announcements(options, MachineClock(), CollectorRegistry()) as members:
        assert members is not None
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                for _ in range(args.trials)
            ]
            killed = [free_port() for _ in range(args.trials)]
            ports = [*killed, *(listener.getsockname()[1] for listener in silent)]
            urls = [f"https://127.0.0.1:{at}" for at in ports]
            refusing = urls[: args.trials]
            credentials = [Credentials.of(KEY) for _ in urls]
            clients = [
                ClusterClient(
                    f"https://127.0.0.1:{port}",
                    IdentityRole.GATEWAY,
                    ClusterTls(own),
                    max_answer_bytes=1 << 16,
                )
                for own in credentials
            ]
            seconds = await asyncio.gather(
                *(
                    measure_death(members, client, own, url, args.lease, is_killed=url in refusing)
                    for client, own, url in zip(clients, credentials, urls, strict=True)
                )
            )
            for client in clients:
                client.close()
    return Deaths(
        args.lease,
        statistics.median(seconds[: args.trials]),
        statistics.median(seconds[args.trials :]),
        args.trials,
    )


async def measure_death(
    members: AnnouncedWorkers,
    client: ClusterClient,
    credentials: Credentials,
    url: str,
    lease_s: float,
    *,
    is_killed: bool,
) -> float:
    """Announce once, end at a random moment before the renewal: seconds until it is taken out."""
    announcement = Announcement(
        worker=WorkerId(url),
        epoch=new_epoch(),
        url=url,
        role=Role.BOTH,
        lease_s=lease_s,
        sequence=1,
    )
    sealed = seal_announcement(announcement, credentials)
    await client.post(ANNOUNCEMENTS_PATH, sealed, 5.0)
    await asyncio.sleep(random.Random(url).uniform(0, lease_s / RENEWALS_PER_LEASE))
    began = time.monotonic()
    if is_killed:  # its sockets are closed; a host that is lost closes none
        client.close()
    while members.table.find(announcement.worker) is not None:
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def free_port() -> int:
    """A port that nothing listens on, just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def print_table(results: dict[str, Any]) -> None:
    """As docs/clusters/leases.md has it."""
    every, some = results["simulation"]
    size = f"{every['num_workers']:,} workers, {every['num_gateways']} gateways"
    print(
        f"| {size}: of a core, for one gateway | all reach it | a tenth reach another one alone |"
    )
    print("|---|---|---|")
    kinds = {
        "direct_share": "announcements of workers: read, offer, reply",
        "relayed_share": "relayed announcements: signature, read, offer",
        "exchange_share": "exchanges: encode, decode, compare",
        "sweep_share": "looking for leases that are over",
    }
    for name, label in kinds.items():
        print(f"| {label} | {every[name]:.2%} | {some[name]:.2%} |")
    totals = [sum(each[name] for name in kinds) for each in (every, some)]
    print(f"| **all of that** | **{totals[0]:.2%}** | **{totals[1]:.2%}** |")
    print(f"| memory of leases, MiB | {every['gateway_mib']:.1f} | {some['gateway_mib']:.1f} |")
    print("| a gateway that starts knows all after, s (both sides) | ", end="")
    print(f"{every['learned_all_s']:.2f} | {some['learned_all_s']:.2f} |\n")
    listener, deaths = results["listener"], results["death"]
    print(f"| one real listener, {listener['num_connections']} connections | |")
    print("|---|---|")
    print(f"| CPU for one announcement, with TLS and HTTP | {listener['cpu_us']:.0f} us |")
    share, lease_s = listener["share_of_1000"], deaths["lease_s"]
    print(f"| of a core, for 1,000 workers with leases of {lease_s:g} s | {share:.1%} |")
    print(f"| memory of the process | {listener['rss_mib']:.0f} MiB |")
    print(f"| and without connections | {listener['base_mib']:.0f} MiB |")
    trials = deaths["num_trials"]
    print(
        f"| a killed worker is taken out after (median of {trials}) | {deaths['killed_s']:.2f} s |"
    )
    print(f"| a silent one | {deaths['silent_s']:.2f} s |")


def main() -> None:
    """Run the parts, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--gateways", type=int, default=20)
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--unreached", type=float, default=0.1)
    parser.add_argument("--simulated-s", type=float, default=12.0)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print_table(json.loads(args.table.read_text()))
        return
    some = args.unreached
    simulations = []
    for args.unreached in (0.0, some):
        simulations.append(asdict(simulate(args)))
        print(simulations[-1], file=sys.stderr)
    results = {
        "simulation": simulations,
        "listener": asdict(measure_listener(args)),
        "death": asdict(asyncio.run(measure_deaths(args))),
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print_table(results)


if __name__ == "__main__":
    main()
