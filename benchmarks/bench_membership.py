"""Membership of many workers at many gateways: CPU, memory, and how soon an end is known.

`python benchmarks/bench_membership.py` runs three parts and prints a table (`--json FILE` keeps the
figures, `--table FILE` prints those of a file again):

simulation  1,000 workers and 20 gateways in one process and in virtual time: the production
            lease tables, fences, heartbeats, encodings and signatures; messages are delivered at
            once, heartbeats are lost at random (`--loss`). CPU time of what a gateway does, by kind
            of work. Some workers do not run for 2 s, and some end without a sign (`--faults` of
            each): how soon each gateway finds that. In a second run a part of the workers reaches
            only one gateway (`--unreached`), so that exchanges have something to relay.
listener    one gateway's real listener with a real TLS connection for each of `--connections`
            workers, in a process of its own: CPU seconds for each announcement (posted, and by a
            datagram) and for each heartbeat, and memory. What a fleet of 1,000 costs is that times
            its announcements and heartbeats a second.
death       real listeners: from the end of a worker until a gateway has taken it out, killed (its
            address refuses) and silent (its address answers nothing); and until its heartbeats
            were missing for so long that its requests are given up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
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
from yarl import URL

from baton.auth.certificates import IdentityRole
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant, MachineClock
from baton.config.sections import GatewaySection
from baton.gateway.members.announced import SWEEP_S
from baton.gateway.members.gossip import INTERVAL_S as GOSSIP_INTERVAL_S
from baton.gateway.members.gossip import NUM_PEERS
from baton.gateway.members.heartbeat_table import (
    HeartbeatTable,
    Renewal,
    Silence,
    judge_silence,
)
from baton.gateway.members.lease_table import MIN_INTERVAL_S, LeaseTable
from baton.gateway.members.listener import open_announcements
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.ids import Epoch, WorkerId, new_epoch
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
from baton.protocol.heartbeats import (
    HEARTBEAT_INTERVAL_S,
    Acknowledgement,
    HeartbeatGrant,
    make_acknowledgement,
    make_heartbeat,
    make_renewal,
    read_acknowledgement,
)
from baton.protocol.worker_http import Role
from baton.worker.announcer import RENEWALS_PER_POST
from baton.worker.fence import MembershipFence, Standing
from baton.worker.heartbeats import HeartbeatSender

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from baton.gateway.members.announced import AnnouncedWorkers

KEY = ClusterKey(b"m" * 32)
STATIC = (WorkerAddress("https://127.0.0.1:1", Role.BOTH),)
SILENT_AFTER_S = GatewaySection().silent_after_s
STALL_S = 2.0
HEARTBEATS_FOR_S = 5.0
MAX_LOST = 0.05
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
    heartbeat_share: float = 0.0
    gateway_mib: float = 0.0
    learned_all_s: float = 0.0
    num_false_ends: int = 0
    num_fenced: int = 0
    num_stalled: int = 0
    num_stalls_suspected: int = 0
    """Of all stalls at all gateways that reach the worker."""
    num_stalls_silent: int = 0
    """The same: wrongly given up."""
    num_ended: int = 0
    silent_after_median_s: float = 0.0
    silent_after_max_s: float = 0.0
    num_unnoticed: int = 0


@dataclass
class SimulatedWorker:
    """One worker: its credentials are its own, as each process's are."""

    number: int
    template: Announcement
    credentials: Credentials
    reached: list[int]
    fence: MembershipFence
    next_at: float
    sequence: int = 0
    grants: list[HeartbeatGrant] = field(default_factory=list)
    """Of each gateway that it reaches."""
    heartbeat_at: float = 0.0
    num_heartbeats: int = 0
    stalls_at: float = math.inf
    """It does not run for `STALL_S` from then on; `ends_at`: not at all."""
    ends_at: float = math.inf

    def runs(self, now: float) -> bool:
        """Whether it does."""
        return now < self.ends_at and not self.stalls_at <= now < self.stalls_at + STALL_S


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
        self.heartbeats = [HeartbeatTable(bytes([at]) * 32) for at in range(args.gateways)]
        self.suspected: set[tuple[int, WorkerId]] = set()
        self.silent: dict[tuple[int, WorkerId], float] = {}
        self.ended: set[WorkerId] = set()
        self.now = 0.0
        self.num_direct = self.num_relayed = self.num_false_ends = 0
        self.workers = [self._make_worker(number) for number in range(args.workers)]
        self.reply = msgspec.msgpack.Decoder(AnnouncementReply)
        self.exchange = msgspec.msgpack.Decoder(Exchange)
        self.answer = msgspec.msgpack.Decoder(ExchangeReply)

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
            number, template, Credentials.of(KEY), reached, MembershipFence(lease_s), start_s
        )

    def run(self, until_s: float) -> None:
        """Go on to a time, in steps of a sweep."""
        while self.now < until_s:
            self.now += SWEEP_S
            for worker in self.workers:
                if worker.runs(self.now):
                    if worker.next_at <= self.now:
                        self.announce(worker)
                    self.send_heartbeats(worker)
            for number, table in enumerate(self.tables):
                self.find_silent(number)
                with self.cpu.spent_on("sweep"):
                    lapsed = table.lapse(Instant(self.now))
                    table.take_overdue(Instant(self.now))
                self.num_false_ends += sum(each.worker not in self.ended for each in lapsed)
                if int(self.now / GOSSIP_INTERVAL_S + number / len(self.tables)) != int(
                    (self.now - SWEEP_S) / GOSSIP_INTERVAL_S + number / len(self.tables)
                ):
                    others = [other for other in range(len(self.tables)) if other != number]
                    for peer in self.rng.sample(others, min(NUM_PEERS, len(others))):
                        self.exchange_between(number, peer)

    def announce(self, worker: SimulatedWorker) -> None:
        """Sign once, deliver to every gateway that the worker reaches."""
        worker.next_at = self.now + worker.template.lease_s / RENEWALS_PER_LEASE
        worker.sequence += 1
        announcement = msgspec.structs.replace(worker.template, sequence=worker.sequence)
        sealed = seal_announcement(announcement, worker.credentials)
        worker.fence.sent(worker.sequence, Instant(self.now))
        sender = worker.credentials.signer.certificate
        if worker.grants and (worker.number + worker.sequence) % (1 + RENEWALS_PER_POST):
            self.renew(worker, sealed)
        else:
            self.post(worker, sealed, sender)
        if not worker.grants:
            name, epoch, url = announcement.worker, announcement.epoch, URL(announcement.url)
            worker.grants = [
                self.heartbeats[at].grant(name, epoch, url, sender) for at in worker.reached
            ]
            worker.heartbeat_at = self.now + self.rng.uniform(0, HEARTBEAT_INTERVAL_S)
        worker.fence.accepted(worker.sequence, Instant(self.now))

    def post(self, worker: SimulatedWorker, sealed: bytes, sender: bytes) -> None:
        """An announcement over TLS, to every gateway that it reaches."""
        for number in worker.reached:
            with self.cpu.spent_on("direct"):
                read = read_announcement(sealed, self.credentials, sender)
                verdict = self.tables[number].offer(read, sealed, Instant(self.now))
                body = msgspec.msgpack.encode(AnnouncementReply(result="accepted"))
            assert verdict.outcome == "accepted", verdict
            assert self.reply.decode(body).result == "accepted"
            self.num_direct += 1

    def renew(self, worker: SimulatedWorker, sealed: bytes) -> None:
        """The same by datagrams."""
        for number, grant in zip(worker.reached, worker.grants, strict=True):
            datagram = make_renewal(grant, sealed)
            assert datagram is not None
            with self.cpu.spent_on("direct"):
                renewal = self.heartbeats[number].read_renewal(datagram, Instant(self.now))
                assert isinstance(renewal, Renewal), renewal
                known = renewal.sender.certificate
                read = read_announcement(renewal.sealed, self.credentials, known)
                verdict = self.tables[number].offer(read, renewal.sealed, Instant(self.now))
                taken = Acknowledgement(read.sequence, asks_for_post=False)
                answer = make_acknowledgement(grant, taken)
            assert verdict.outcome == "accepted", verdict
            assert read_acknowledgement(answer, grant) is not None
            self.num_direct += 1

    def send_heartbeats(self, worker: SimulatedWorker) -> None:
        """One of those that are due, to every gateway that it reaches; some are lost."""
        if not worker.grants or worker.heartbeat_at > self.now:
            return
        late_s = self.now - worker.heartbeat_at
        worker.heartbeat_at = self.now + HEARTBEAT_INTERVAL_S - min(late_s, SWEEP_S)
        worker.num_heartbeats += 1
        for number, grant in zip(worker.reached, worker.grants, strict=True):
            if self.rng.random() >= self.args.loss:
                datagram = make_heartbeat(grant, worker.num_heartbeats)
                with self.cpu.spent_on("heartbeat"):
                    self.heartbeats[number].take(datagram, Instant(self.now))

    def find_silent(self, number: int) -> None:
        """What one gateway makes of the heartbeats that are missing there."""
        with self.cpu.spent_on("heartbeat"):
            now = Instant(self.now)
            missing = self.heartbeats[number].missing(now)
        for each in missing:
            silence = judge_silence(self.now - (each.received_at or 0.0), SILENT_AFTER_S)
            if silence is not Silence.NONE:
                self.suspected.add((number, each.worker))
            if silence is Silence.SILENT:
                self.silent.setdefault((number, each.worker), self.now)

    def plan_faults(self, until_s: float) -> None:
        """Some workers stall, and others end, at random times before `until_s`."""
        chosen = self.rng.sample(self.workers, 2 * self.args.faults)
        latest_s = until_s - 2 * SILENT_AFTER_S
        for worker in chosen[: self.args.faults]:
            worker.stalls_at = self.rng.uniform(self.now, latest_s)
        self.ended = {worker.template.worker for worker in chosen[self.args.faults :]}
        for worker in chosen[self.args.faults :]:
            worker.ends_at = self.rng.uniform(self.now, latest_s)
        self.suspected.clear()
        self.silent.clear()

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
    fleet.plan_faults(warm_up_s + args.simulated_s)
    fleet.run(warm_up_s + args.simulated_s)
    note_faults(fleet, result)
    of_gateway_s = args.simulated_s * args.gateways
    result.announcements_per_s = fleet.num_direct / of_gateway_s
    result.relayed_per_s = fleet.num_relayed / of_gateway_s
    for kind, spent_s in fleet.cpu.spent_s.items():
        setattr(result, f"{kind}_share", spent_s / of_gateway_s)
    result.gateway_mib = size / MIB / args.gateways
    result.learned_all_s = learned_s
    result.num_false_ends = fleet.num_false_ends
    result.num_fenced = sum(
        worker.fence.look(Instant(fleet.now)) is not Standing.SERVING
        for worker in fleet.workers
        if worker.ends_at > fleet.now
    )
    return result


def note_faults(fleet: SimulatedFleet, result: Simulation) -> None:
    """How soon each gateway that a worker reached has found its end, and what of the others."""
    seconds: list[float] = []
    for worker in fleet.workers:
        name = worker.template.worker
        for number in worker.reached:
            silent_at = fleet.silent.get((number, name))
            if worker.ends_at < math.inf:
                result.num_unnoticed += silent_at is None
                seconds.append((silent_at or math.inf) - worker.ends_at)
            else:
                result.num_stalls_silent += silent_at is not None
                result.num_stalls_suspected += (number, name) in fleet.suspected
    result.num_stalled = sum(worker.stalls_at < math.inf for worker in fleet.workers)
    result.num_ended = sum(worker.ends_at < math.inf for worker in fleet.workers)
    result.silent_after_median_s, result.silent_after_max_s = (
        statistics.median(seconds),
        max(seconds),
    )


@dataclass
class Listener:
    """One real listener under load."""

    num_connections: int
    num_announcements: int
    cpu_us: float
    """Of the gateway's process, user and system, for each announcement that is posted."""
    renewal_cpu_us: float
    """For each one by a datagram, its acknowledgement included."""
    rss_mib: float
    """The process at its end, and `base_mib` before the first connection."""
    base_mib: float
    share_of_1000: float
    """Of a core, for 1,000 workers that announce themselves each lease / 3, a tenth by posts."""
    heartbeat_cpu_us: float
    """The same for each heartbeat, beyond what the process spends without them."""
    heartbeats_of_1000: float
    """Of a core, for 1,000 workers."""
    lost_heartbeats: float
    """Share of those that were sent at that rate and did not arrive."""


def serve(pipe: Connection, port: int) -> None:
    """A process with a listener: reports CPU time and memory when asked, ends at None."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe, port))


async def _serve(pipe: Connection, port: int) -> None:
    options = GatewayOptions(
        addresses=STATIC,
        members=("announced",),
        credentials=Credentials.of(KEY),
        key_origin="configured",
        announce_port=port,
    )
    registry = CollectorRegistry()
    async with open_announcements(options, MachineClock(), registry):
        pipe.send("ready")
        while True:
            question = await asyncio.to_thread(pipe.recv)
            if question is None:
                return
            usage = resource.getrusage(resource.RUSAGE_SELF)
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            counted = [
                registry.get_sample_value("baton_gateway_heartbeats_total", {"result": result})
                for result in ("taken", "renewed")
            ]
            taken = sum(int(each or 0) for each in counted)
            pipe.send((usage.ru_utime + usage.ru_stime, rss / MIB, taken))


async def load(
    pipe: Connection, port: int, num_connections: int, num_rounds: int, lease_s: float
) -> Listener:
    """Announce many workers over a connection each, in turn, as fast as it goes."""
    credentials = Credentials.of(KEY)
    tls = ClusterTls(credentials)
    pipe.send("usage")
    _, base_mib, _ = pipe.recv()
    clients, templates, grants = [], list[Announcement](), dict[int, HeartbeatGrant]()
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
        reply = msgspec.msgpack.decode(body, type=AnnouncementReply)
        assert reply.result == "accepted", body
        assert reply.heartbeat is not None
        grants[number] = reply.heartbeat

    for number in range(num_connections):  # the TLS handshakes
        await announce(number, 1)
    pipe.send("usage")
    before_s, _, _ = pipe.recv()
    for sequence in range(2, 2 + num_rounds):
        await asyncio.sleep(MIN_INTERVAL_S)
        for first in range(0, num_connections, 16):
            group = range(first, min(first + 16, num_connections))
            await asyncio.gather(*(announce(number, sequence) for number in group))
    pipe.send("usage")
    after_s, rss_mib, _ = pipe.recv()
    heartbeats = make_heartbeats(grants)
    idle_share, _ = await send_datagrams(pipe, port, heartbeats, rate_per_s=0)
    rate_per_s = 1000 / HEARTBEAT_INTERVAL_S
    loaded_share, lost = await send_datagrams(pipe, port, heartbeats, rate_per_s=rate_per_s)
    renewals = make_renewals(grants, templates, credentials, first_sequence=2 + num_rounds)
    renewal_rate_per_s = 1000 * RENEWALS_PER_LEASE / lease_s
    renewal_share, lost_renewals = await send_datagrams(
        pipe, port, renewals, rate_per_s=renewal_rate_per_s
    )
    assert lost_renewals < MAX_LOST, f"{lost_renewals:.1%} of the renewals were not taken"
    for client in clients:
        client.close()
    num_announcements = num_rounds * num_connections
    cpu_s = (after_s - before_s) / num_announcements
    renewal_s = (renewal_share - idle_share) / renewal_rate_per_s
    mean_s = (cpu_s + RENEWALS_PER_POST * renewal_s) / (1 + RENEWALS_PER_POST)
    share = mean_s * renewal_rate_per_s
    heartbeat_share = loaded_share - idle_share
    return Listener(
        num_connections,
        num_announcements,
        cpu_s * 1e6,
        renewal_s * 1e6,
        rss_mib,
        base_mib,
        share,
        heartbeat_share / rate_per_s * 1e6,
        heartbeat_share,
        lost,
    )


def make_heartbeats(grants: dict[int, HeartbeatGrant]) -> Iterator[bytes]:
    """Without end, of one worker after the other."""
    for sequence in itertools.count(1):
        for grant in grants.values():
            yield make_heartbeat(grant, sequence)


def make_renewals(
    grants: dict[int, HeartbeatGrant],
    templates: list[Announcement],
    credentials: Credentials,
    *,
    first_sequence: int,
) -> Iterator[bytes]:
    """The same."""
    for sequence in itertools.count(first_sequence):
        for number, grant in grants.items():
            announcement = msgspec.structs.replace(templates[number], sequence=sequence)
            renewal = make_renewal(grant, seal_announcement(announcement, credentials))
            assert renewal is not None
            yield renewal


async def send_datagrams(
    pipe: Connection, port: int, datagrams: Iterator[bytes], *, rate_per_s: float
) -> tuple[float, float]:
    """Send them at a rate: what share of a core the process spends, and the share lost."""
    pipe.send("usage")
    before_s, _, taken_before = pipe.recv()
    began, num_sent = time.monotonic(), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        while (elapsed_s := time.monotonic() - began) < HEARTBEATS_FOR_S:
            while num_sent < elapsed_s * rate_per_s:
                sock.sendto(next(datagrams), ("127.0.0.1", port))
                num_sent += 1
            await asyncio.sleep(0.002)
    await asyncio.sleep(2 * SWEEP_S)
    pipe.send("usage")
    after_s, _, taken = pipe.recv()
    lost = 1 - (taken - taken_before) / num_sent if num_sent else 0.0
    return (after_s - before_s) / (time.monotonic() - began), lost


def measure_listener(args: argparse.Namespace) -> Listener:
    """The part `listener`."""
    port = free_port()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, port))
    process.start()
    there.close()  # a process that ends before it is ready is not waited for
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
    given_up_s: float
    given_up_max_s: float
    num_trials: int


class SilentWorkers:
    """Implements `Liveness`: when each worker was found silent."""

    def __init__(self) -> None:
        self.at: dict[WorkerId, float] = {}

    def look(self, heartbeats: HeartbeatTable, now: Instant) -> None:
        """See `Liveness`."""
        for each in heartbeats.missing(now):
            silent_s = now - (each.received_at or 0.0)
            if judge_silence(silent_s, SILENT_AFTER_S) is Silence.SILENT:
                self.at.setdefault(each.worker, time.monotonic())

    def lost(self, origin: URL, epoch: Epoch, reason: str) -> None:
        """See `Liveness`. Workers are named by their URLs here."""
        del epoch, reason
        self.at.setdefault(WorkerId(str(origin)), time.monotonic())


async def measure_deaths(args: argparse.Namespace) -> Deaths:
    """The part `death`: several workers at once, which end at random moments between renewals."""
    port = free_port()
    options = GatewayOptions(
        addresses=STATIC,
        members=("announced",),
        credentials=Credentials.of(KEY),
        key_origin="configured",
        announce_port=port,
    )
    async with open_announcements(options, MachineClock(), CollectorRegistry()) as members:
        assert members is not None
        members.liveness = silent_workers = SilentWorkers()
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
    ends = seconds[args.trials :]
    given_up = [silent_workers.at[end.worker] - end.at for end in ends]
    return Deaths(
        args.lease,
        statistics.median(end.taken_out_s for end in seconds[: args.trials]),
        statistics.median(end.taken_out_s for end in ends),
        statistics.median(given_up),
        max(given_up),
        args.trials,
    )


@dataclass
class Death:
    """When a worker ended, by time.monotonic(), and after how long it was taken out."""

    worker: WorkerId
    at: float
    taken_out_s: float


async def measure_death(
    members: AnnouncedWorkers,
    client: ClusterClient,
    credentials: Credentials,
    url: str,
    lease_s: float,
    *,
    is_killed: bool,
) -> Death:
    """Announce once, send heartbeats, and end at a random moment before the renewal."""
    announcement = Announcement(
        worker=WorkerId(url),
        epoch=new_epoch(),
        url=url,
        role=Role.BOTH,
        lease_s=lease_s,
        sequence=1,
    )
    sealed = seal_announcement(announcement, credentials)
    body = await client.post(ANNOUNCEMENTS_PATH, sealed, 5.0)
    sender, reply = HeartbeatSender(), msgspec.msgpack.decode(body, type=AnnouncementReply)
    assert client.peer is not None
    assert reply.heartbeat is not None
    sender.add(client.url, reply.heartbeat, client.peer)
    began = time.monotonic() + random.Random(url).uniform(0.5, lease_s / RENEWALS_PER_LEASE)
    while (left_s := began - time.monotonic()) > 0:
        sender.send()
        await asyncio.sleep(min(left_s, HEARTBEAT_INTERVAL_S))
    began = time.monotonic()
    sender.close()
    if is_killed:  # its sockets are closed; a host that is lost closes none
        client.close()
    while members.table.find(announcement.worker) is not None:
        await asyncio.sleep(0.01)
    return Death(announcement.worker, began, time.monotonic() - began)


def free_port() -> int:
    """A port that nothing listens on, just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def print_table(results: dict[str, Any]) -> None:
    """As docs/clusters/leases.md has it."""
    every, some = results["simulation"]
    size = f"{every['num_workers']:,} workers, {every['num_gateways']} gateways"
    print(f"| {size}: of a core, for one gateway | all reach it | a tenth reach another one |")
    print("|---|---|---|")
    kinds = {
        "direct_share": "announcements of workers: read, offer, reply",
        "relayed_share": "relayed announcements: signature, read, offer",
        "exchange_share": "exchanges: encode, decode, compare",
        "sweep_share": "looking for leases that are over",
        "heartbeat_share": "heartbeats: check, and looking for those that are missing",
    }
    for name, label in kinds.items():
        print(f"| {label} | {every[name]:.2%} | {some[name]:.2%} |")
    totals = [sum(each[name] for name in kinds) for each in (every, some)]
    print(f"| **all of that** | **{totals[0]:.2%}** | **{totals[1]:.2%}** |")
    print(f"| memory of leases, MiB | {every['gateway_mib']:.1f} | {some['gateway_mib']:.1f} |")
    for name, label in (
        ("silent_after_median_s", "a worker that ends is found silent after (median), s"),
        ("silent_after_max_s", "the latest of all workers and gateways, s"),
    ):
        print(f"| {label} | {every[name]:.2f} | {some[name]:.2f} |")
    stalls = [f"{r['num_stalls_suspected']} / {r['num_stalls_silent']}" for r in (every, some)]
    print(
        f"| {every['num_stalled']} workers do not run for {STALL_S:g} s: suspected / given up, at "
        f"all gateways | {stalls[0]} | {stalls[1]} |"
    )
    print("| a gateway that starts knows all after, s (both sides) | ", end="")
    print(f"{every['learned_all_s']:.2f} | {some['learned_all_s']:.2f} |\n")
    listener, deaths = results["listener"], results["death"]
    print(f"| one real listener, {listener['num_connections']} connections | |")
    print("|---|---|")
    print(f"| CPU for one announcement, with TLS and HTTP | {listener['cpu_us']:.0f} us |")
    print(f"| by a datagram, with its acknowledgement | {listener['renewal_cpu_us']:.0f} us |")
    share, lease_s = listener["share_of_1000"], deaths["lease_s"]
    print(f"| of a core, for 1,000 workers, leases of {lease_s:g} s, a tenth posts | {share:.1%} |")
    print(f"| CPU for one heartbeat | {listener['heartbeat_cpu_us']:.0f} us |")
    print(f"| of a core, for 1,000 workers | {listener['heartbeats_of_1000']:.1%} |")
    print(f"| heartbeats lost at that rate | {listener['lost_heartbeats']:.1%} |")
    print(f"| memory of the process | {listener['rss_mib']:.0f} MiB |")
    print(f"| and without connections | {listener['base_mib']:.0f} MiB |")
    trials = deaths["num_trials"]
    print(
        f"| a killed worker is taken out after (median of {trials}) | {deaths['killed_s']:.2f} s |"
    )
    print(f"| a silent one | {deaths['silent_s']:.2f} s |")
    print(
        "| and its requests are given up after (median, longest) | "
        f"{deaths['given_up_s']:.2f} s, {deaths['given_up_max_s']:.2f} s |"
    )


def main() -> None:
    """Run the parts, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--gateways", type=int, default=20)
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--faults", type=int, default=50)
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
