"""Segments that TCP sends again, on links that are full and links that lose packets.

`alerts.link_loss_share` must lie between the two: a connection that fills a link loses packets by
itself, as far as congestion control lets it. A sender and a receiver on one switch, in network
namespaces; connections as Baton's `tcp` makes them (two, or eight for several senders at once),
which send without pause (`full`) or one prompt's KV at a time (`bursts`: 512 KiB each 25 ms).

    sender     the sender's own queue limits the link (htb): the kernel does not overfill it
    port       the switch's port does (tbf), with a queue of so many bytes, and drops what is more
    loss       as sender, and nftables drops a share of the packets at the receiver

Each case is measured in samples, which `LossTest` reads as if they were 5 s apart. `lossy`: how
many of the samples it calls lossy. What was dropped is counted by the port, or by nftables.

    python benchmarks/bench_link_loss.py --json benchmarks/results/link-loss.json   (3 minutes)
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import threading
import time
import timeit
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from link_faults import lost_packets, shape
from run_record import write_record

from baton.config.sections import AlertsSection
from baton.gateway.alerts.link_loss import LossTest
from baton.telemetry.transfer_report import SegmentCounts
from baton.testing.network_namespaces import BridgedHost, NoNamespaceError, bridged_hosts
from baton.transfer.transports.tcp.segments import count_growth, read_segment_counts

if TYPE_CHECKING:
    from collections.abc import Iterator

RATE_MBIT = 400
REPORT_S = 5.0
"""Between two reports of a worker."""
BURST_BYTES = 512 << 10
BURST_EVERY_S = 0.025
CHUNK_BYTES = 1 << 18
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Case:
    """`amount`: bytes of the port's queue, or one of how many packets is lost."""

    path: Literal["sender", "port", "loss"]
    amount: int
    congestion: str
    num_connections: int
    traffic: Literal["full", "bursts"]


@dataclass(frozen=True)
class Found:
    """What the kernel counted, and the share of what was really dropped."""

    case: Case
    sent: SegmentCounts
    retransmitted_share: float
    lost_share: float
    dropped_share: float
    mbit_s: float
    num_samples: int
    num_lossy: int


def list_cases() -> Iterator[Case]:
    """Full links first, then lossy ones."""
    for congestion in ("bbr", "cubic"):
        yield Case("sender", 0, congestion, 2, "full")
        for queue_bytes, num in itertools.product((64_000, 256_000, 1_000_000), (2, 8)):
            yield Case("port", queue_bytes, congestion, num, "full")
        yield Case("port", 256_000, congestion, 2, "bursts")
        for lost_of in (1000, 333, 100):
            yield Case("loss", lost_of, congestion, 2, "full")
        yield Case("loss", 100, congestion, 2, "bursts")


class Flows:
    """Connections from one host to the other, which send until they are closed."""

    def __init__(self, sender: BridgedHost, receiver: BridgedHost, case: Case) -> None:
        self._case, self._stop = case, threading.Event()
        self._sockets: list[socket.socket] = []
        self.senders: list[socket.socket] = []
        listener = receiver.open_socket(socket.SOCK_STREAM)
        listener.bind((receiver.address, 0))
        listener.listen()
        for _ in range(case.num_connections):
            near = sender.open_socket(socket.SOCK_STREAM)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, case.congestion.encode())
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            near.settimeout(TIMEOUT_S)
            near.connect(listener.getsockname())
            far, _ = listener.accept()
            far.settimeout(TIMEOUT_S)
            self.senders.append(near)
            self._sockets += [near, far]
        listener.close()
        pairs = zip(self._sockets[::2], self._sockets[1::2], strict=True)
        self._threads = [
            threading.Thread(target=target, args=(sock,), daemon=True)
            for near, far in pairs
            for target, sock in ((self._send, near), (self._read, far))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for sock in self._sockets:
            sock.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def count(self) -> list[SegmentCounts]:
        """Of each connection since its start."""
        counts = [read_segment_counts(sock) for sock in self.senders]
        return [each for each in counts if each is not None]

    def _send(self, sock: socket.socket) -> None:
        is_full = self._case.traffic == "full"
        data = bytes(CHUNK_BYTES if is_full else BURST_BYTES // self._case.num_connections)
        try:
            while not self._stop.is_set():
                sock.sendall(data)
                if not is_full:
                    time.sleep(BURST_EVERY_S)
        except OSError:
            return

    def _read(self, sock: socket.socket) -> None:
        buffer = bytearray(CHUNK_BYTES)
        try:
            while sock.recv_into(buffer):
                pass
        except OSError:
            return


def measure(case: Case, options: argparse.Namespace) -> Found:
    """One case, in namespaces of its own."""
    with ExitStack() as stack:
        hosts = stack.enter_context(bridged_hosts(2))
        sender, receiver = hosts
        sender.send_single_packets()
        evidence = None
        if case.path == "port":
            port = receiver.behind_a_full_port(RATE_MBIT * 125_000, case.amount)
            stack.enter_context(port)
        else:
            (link,) = shape(hosts, RATE_MBIT)
            if case.path == "loss":
                evidence = stack.enter_context(lost_packets(link, case.amount))
        flows = stack.enter_context(Flows(sender, receiver, case))
        time.sleep(options.warm_up)
        before, began = flows.count(), time.monotonic()
        dropped_before = receiver.count_port_drops() if case.path == "port" else 0
        test, latest, num_lossy = LossTest(options.limit), SegmentCounts(), 0
        test.note(latest, 0.0)
        for number in range(1, options.samples + 1):
            time.sleep(max(0.0, began + number * options.sample - time.monotonic()))
            now = flows.count()
            latest = SegmentCounts()
            for counts, earlier in zip(now, before, strict=True):
                latest = latest.plus(count_growth(counts, earlier))
            num_lossy += test.note(latest, number * REPORT_S)
        took_s = time.monotonic() - began
        if evidence is not None:
            seen = evidence()
            dropped_share = seen.during
            if not seen.happened:
                sys.exit(f"the packets were not lost: {case} {seen}")
        else:
            dropped = receiver.count_port_drops() - dropped_before if case.path == "port" else 0
            dropped_share = dropped / latest.num
    return Found(
        case,
        latest,
        latest.num_retransmitted / latest.num,
        latest.lost_share or 0.0,
        dropped_share,
        latest.num_bytes * 8e-6 / took_s,
        options.samples,
        num_lossy,
    )


def measure_reading() -> float:
    """Microseconds to read one connection's counts: the least of several runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        far, _ = listener.accept()
        with near, far:
            runs = timeit.repeat(lambda: read_segment_counts(near), number=2000, repeat=7)
    return min(runs) / 2000 * 1e6


def print_table(path: Path) -> None:
    """As docs/observability/alerts.md has it: a row for each link."""
    rows: dict[tuple[object, ...], list[str]] = {}
    kinds: list[str] = []
    for it in json.loads(path.read_text("utf-8"))["found"]:
        case = it["case"]
        if case["congestion"] not in kinds:
            kinds.append(case["congestion"])
        key = case["path"], case["amount"], case["num_connections"], case["traffic"]
        rows.setdefault(key, []).extend((
            f"{it['dropped_share']:.2%}",
            f"{it['retransmitted_share']:.2%}",
            f"{it['lost_share']:.2%}",
            f"{it['num_lossy']} of {it['num_samples']}",
        ))
    heads = [
        f"{kind}: {part}"
        for kind in kinds
        for part in ("dropped", "sent again", "counted as lost", "lossy")
    ]
    print("| link | connections | traffic |", " | ".join(heads), "|")
    print("|---" * (3 + len(heads)) + "|")
    for (link, amount, num, traffic), cells in rows.items():
        print(
            f"| {_name(str(link), int(str(amount)))} | {num} | {traffic} |", " | ".join(cells), "|"
        )


def _name(path: str, amount: int) -> str:
    match path:
        case "sender":
            return "limited by the sender's queue"
        case "port":
            return f"switch port, queue of {amount // 1000} kB"
        case _:
            return f"1 of {amount} packets lost"


def main() -> None:
    """Measure, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=AlertsSection().link_loss_share)
    parser.add_argument("--sample", type=float, default=0.5, help="seconds of each sample")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds before the first one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print a table of such a JSON file")
    options = parser.parse_args()
    if options.table:
        print_table(options.table)
        return
    found = []
    try:
        for case in list_cases():
            found.append(measure(case, options))
            print(found[-1], flush=True)
    except NoNamespaceError as exc:
        sys.exit(f"skipped: {exc}; run it as root, with iproute2")
    read_us = measure_reading()
    print(f"{read_us:.1f} us to read a connection")
    listed = [_plain(each) for each in found]
    write_record(options.json, limit=options.limit, read_us=read_us, found=listed)


def _plain(found: Found) -> dict[str, object]:
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    sent = {name: getattr(found.sent, name) for name in found.sent.__struct_fields__}
    return fields | {"sent": sent}


if __name__ == "__main__":
    main()
