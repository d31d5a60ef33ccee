"""Faults of the link between two network namespaces, and measurements that they happened.

`Link` is one direction: what the sender's host sends to the receiver's passes a htb class of its
own. Its faults are context managers; each gives a function that measures the fault while it lasts,
on connections of its own or by the kernel's counters, and not by what Baton reports.

The kernel's netem, which delays and loses packets, is often missing. So a delay is that of a TCP
relay in user space: nftables sends all new connections of the sender to it. Packets are lost by a
rule of nftables at the receiver, where the sender's kernel does not learn of it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from baton.testing.network_namespaces import BridgedHost, move_thread_into, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DELAY_S = 0.02
LOST_OF = 100
"""One of so many packets is lost."""
NUM_ROUND_TRIPS = 7
PROBE_BYTES = 1 << 20
PROBE_TIMEOUT_S = 20.0
RELAY_MARK = 7
"""Of the relay's own packets, which are not sent to the relay again."""
RELAY_CHUNKS = 256
CHUNK_BYTES = 1 << 16
SO_ORIGINAL_DST = 80
START_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Evidence:
    """What a fault changed; `happened`: by about as much as it should."""

    what: str
    before: float
    during: float
    happened: bool


@dataclass(frozen=True)
class PathState:
    """What a TCP connection from the sender to the receiver measures."""

    round_trip_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """Of `sender` to `receiver`, in htb class `class_id` of the sender's eth0; Mbit/s."""

    sender: BridgedHost
    receiver: BridgedHost
    class_id: str
    rate: int

    def limit(self, rate: int) -> None:
        """Change its rate."""
        tc = ("tc", "-n", self.sender.namespace, "class", "change", "dev", "eth0", "parent", "1:")
        run(*tc, "classid", self.class_id, *_htb(rate))

    def probe(self) -> PathState:
        """Measure it."""
        with ThreadPoolExecutor(1) as there, ThreadPoolExecutor(1) as here:
            there.submit(move_thread_into, self.receiver.namespace).result()
            here.submit(move_thread_into, self.sender.namespace).result()
            with there.submit(
                socket.create_server, (self.receiver.address, 0)
            ).result() as listener:
                answered = there.submit(_answer_probe, listener)
                state = here.submit(_send_probe, listener.getsockname()).result()
                answered.result()
        return state


def shape(hosts: Sequence[BridgedHost], rate: int) -> list[Link]:
    """Links of the first host to each other one, with classes 1:1, 1:2, ... of its eth0."""
    sender = hosts[0]
    tc = ("tc", "-n", sender.namespace)
    run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "9")
    run(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:9", *_htb(1000))
    links = [Link(sender, host, f"1:{at}", rate) for at, host in enumerate(hosts[1:], start=1)]
    for link in links:
        parent = ("dev", "eth0", "parent", "1:")
        run(*tc, "class", "add", *parent, "classid", link.class_id, *_htb(rate))
        match = ("u32", "match", "ip", "dst", f"{link.receiver.address}/32")
        run(*tc, "filter", "add", *parent, "protocol", "ip", *match, "flowid", link.class_id)
    return links


def _htb(rate: int) -> tuple[str, ...]:
    return ("htb", "rate", f"{rate}mbit", "burst", "16kb", "cburst", "16kb")


def _answer_probe(listener: socket.socket) -> None:
    listener.settimeout(PROBE_TIMEOUT_S)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        for _ in range(NUM_ROUND_TRIPS):
            connection.sendall(connection.recv(1))
        left = PROBE_BYTES
        while left:
            chunk = connection.recv(CHUNK_BYTES)
            if not chunk:
                raise ConnectionError("the probe's connection ended")
            left -= len(chunk)
        connection.sendall(b".")


def _send_probe(address: tuple[str, int]) -> PathState:
    round_trips = []
    with socket.create_connection(address, PROBE_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(NUM_ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            round_trips.append(time.perf_counter() - began)
        began = time.perf_counter()
        connection.sendall(bytes(PROBE_BYTES))
        connection.recv(1)
        took_s = time.perf_counter() - began
    return PathState(statistics.median(round_trips), PROBE_BYTES / took_s)


@contextmanager
def less_bandwidth(link: Link) -> Iterator[Callable[[], Evidence]]:
    """A tenth of it."""
    before = link.probe().bytes_per_s / 1e6
    link.limit(link.rate // 10)

    def measure() -> Evidence:
        during = link.probe().bytes_per_s / 1e6
        return Evidence("MB/s of 1 MiB over TCP", before, during, during < before / 4)

    try:
        yield measure
    finally:
        link.limit(link.rate)


@contextmanager
def lost_packets(link: Link, lost_of: int = LOST_OF) -> Iterator[Callable[[], Evidence]]:
    """One of so many packets of TCP is lost before the receiver's kernel reads it."""
    nft = ("ip", "netns", "exec", link.receiver.namespace, "nft")
    source = f"ip saddr {link.sender.address} meta l4proto tcp"
    run(*nft, "add table ip loss")
    run(*nft, "add counter ip loss seen; add counter ip loss lost")
    run(*nft, "add chain ip loss arriving { type filter hook input priority 0; }")

    def measure() -> Evidence:
        listed = json.loads(run(*nft, "-j", "list", "counters", "table", "ip", "loss"))
        counters = {
            each["counter"]["name"]: each["counter"]["packets"]
            for each in listed["nftables"]
            if "counter" in each
        }
        share = counters["lost"] / max(1, counters["seen"])
        is_near = counters["seen"] >= 20 * lost_of and 0.5 < share * lost_of < 2.0
        return Evidence(f"share lost of {counters['seen']} packets", 0.0, share, is_near)

    try:
        run(*nft, f"add rule ip loss arriving {source} counter name seen")
        lose = f"numgen random mod {lost_of} == 0 counter name lost drop"
        run(*nft, f"add rule ip loss arriving {source} {lose}")
        yield measure
    finally:
        run(*nft, "delete table ip loss")


class DelayRelay:
    """Passes on what the sender's new TCP connections send over `link`; first without delay.

    What comes back is never delayed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listening, self._port = threading.Event(), 0
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        """Start, and have connections sent here."""
        self._thread.start()
        if not self._listening.wait(START_TIMEOUT_S):
            raise OSError("the relay does not listen")
        nft = ("ip", "netns", "exec", self._link.sender.namespace, "nft")
        run(*nft, "add table ip relay")
        run(*nft, "add chain ip relay leaving { type nat hook output priority -100; }")
        to_receiver = f"ip daddr {self._link.receiver.address} meta l4proto tcp"
        rule = f"{to_receiver} meta mark != {RELAY_MARK} redirect to :{self._port}"
        run(*nft, f"add rule ip relay leaving {rule}")
        return self

    def __exit__(self, *_: object) -> None:
        """End it and its connections."""
        if self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)

    @contextmanager
    def delayed(self) -> Iterator[Callable[[], Evidence]]:
        """By `DELAY_S`."""
        before = self._link.probe().round_trip_s * 1e3
        self._delay_s = DELAY_S

        def measure() -> Evidence:
            during = self._link.probe().round_trip_s * 1e3
            added = during - before
            return Evidence("ms of a round trip", before, during, 18 <= added <= 40)

        try:
            yield measure
        finally:
            self._delay_s = 0.0

    def _run(self) -> None:
        move_thread_into(self._link.sender.namespace)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        server = await asyncio.start_server(self._relay, sock=listener)
        self._port = listener.getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until one of its ends closes it."""
        accepted = writer.get_extra_info("socket")
        _, port, address = struct.unpack(
            "!HH4s8x", accepted.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        )
        onward = socket.socket()
        onward.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, RELAY_MARK)
        onward.settimeout(0)
        try:
            await self._loop.sock_connect(onward, (socket.inet_ntoa(address), port))
            far_reader, far_writer = await asyncio.open_connection(sock=onward)
        except OSError:
            onward.close()
            writer.close()
            return
        there = asyncio.ensure_future(self._pass_on_later(reader, far_writer))
        back = asyncio.ensure_future(_pass_on(far_reader, writer))
        await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        for task in (there, back):
            task.cancel()
        writer.close()
        far_writer.close()

    async def _pass_on_later(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(RELAY_CHUNKS)
        sending = asyncio.ensure_future(_send_when_due(chunks, writer))
        try:
            while data := await reader.read(CHUNK_BYTES):
                await chunks.put((time.monotonic() + self._delay_s, data))
            await chunks.put((time.monotonic() + self._delay_s, b""))
            await sending
        except OSError:
            return
        finally:
            sending.cancel()


async def _send_when_due(
    chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
) -> None:
    with suppress(OSError):
        while True:
            due, data = await chunks.get()
            if (left_s := due - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            if not data:
                return
            writer.write(data)
            await writer.drain()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
