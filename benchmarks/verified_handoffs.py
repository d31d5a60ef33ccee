"""Whole handoffs of workload S between two agents in two processes, verified more or less.

256 MiB in 8,192 pages of 32 KiB (16 layers, 512 blocks of 16 tokens) between random places, ready
from the start: what is timed is the handoff alone, from "expect" to "landed" on the receiver.
Level `keyed` is `full` as between two hosts. Used by `bench_verification.py`; the child process is
this module's `main`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, TicketIssuer, WorkerRef
from baton.clock import Instant, MachineClock
from baton.handoff.agent import HandoffAgent
from baton.handoff.interface import KVLanded, ReceiveOrder, SampledToken, SendOrder
from baton.handoff.kv_views import AgentContext, KVView
from baton.handoff.options import AgentOptions
from baton.handoff.peer_transports import LinkOptions
from baton.handoff.verify import Level, VerificationPolicy
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.kv.copies import BlockTable
from baton.kv.layout import KVLayout
from baton.telemetry.trace import RequestSpan
from baton.transfer.interface import TRANSPORTS, TransportContext
from baton.transfer.region import allocate_shared_region, release_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT = KVLayout.gqa(16, 8, 64, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 512
NUM_TOKENS = NUM_BLOCKS * LAYOUT.block_size
NUM_BYTES = NUM_TOKENS * LAYOUT.bytes_per_token
TIMEOUT_S = 120.0
KEYED = "keyed"
CLOCK = MachineClock()
ISSUER = TicketIssuer(CLOCK)


class Hello(msgspec.Struct, tag=True):
    """The child: its receivers by level."""

    receivers: dict[str, WorkerRef]


class Receive(msgspec.Struct, tag=True):
    """To the child: take this handoff in."""

    level: str
    ticket: Ticket


class Received(msgspec.Struct, tag=True):
    """The child: how long it took, and how many bytes were compared."""

    seconds: float
    verified_bytes: int
    cpu_s: float


@dataclass
class AgentEndpoint:
    """One agent and its pages."""

    agent: HandoffAgent
    ref: WorkerRef
    woken: threading.Event

    def wait(self) -> list[object]:
        """The next events."""
        while not (events := self.agent.poll()):
            if not self.woken.wait(TIMEOUT_S):
                raise RuntimeError("nothing came")
            self.woken.clear()
        return list(events)


@contextmanager
def open_endpoint(
    name: str, kind: str, key: Credentials, level: Level = "full"
) -> Iterator[AgentEndpoint]:
    """An agent with 256 MiB of pages."""
    region = allocate_shared_region([(NUM_BLOCKS, LAYOUT.page_bytes(n)) for n in range(16)])
    rng = np.random.default_rng(len(name))
    for array in region.arrays:
        pages = view_pages(region.memory, array)
        pages[:] = rng.integers(0, 256, pages.shape, np.uint8)
    epoch = new_epoch()
    transport = TRANSPORTS.build(kind, {})(TransportContext(key, epoch, "127.0.0.1", CLOCK))
    agent = HandoffAgent(
        AgentOptions(
            worker=WorkerId(name),
            epoch=epoch,
            fingerprint="verification",
            views=(KVView(LAYOUT, region),),
            transports=(transport,),
            credentials=key,
            clock=CLOCK,
            timeout_s=TIMEOUT_S,
            links=LinkOptions("listed"),
            verification=VerificationPolicy(same_host=level, network=level),
        )
    )
    woken = threading.Event()
    agent.start(woken.set)
    try:
        yield AgentEndpoint(agent, WorkerRef(WorkerId(name), epoch, agent.address), woken)
    finally:
        agent.stop()
        release_region(region)


def random_blocks(seed: int) -> BlockTable:
    """All blocks, in random order."""
    return BlockTable(0, np.random.default_rng(seed).permutation(NUM_BLOCKS).astype(np.int64))


def make_trace(leg: str) -> RequestSpan:
    """An empty one."""
    return RequestSpan(request_id="bench", worker="w", epoch="e", role=leg)


def measure(kind: str, levels: tuple[str, ...], num_rounds: int) -> dict[str, list[Received]]:
    """Handoffs over one transport, the levels taking turns; the first round is not kept."""
    key = os.urandom(32).hex()
    command = [sys.executable, __file__, kind, *levels]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ, BENCH_KEY=key),
    )
    found: dict[str, list[Received]] = {level: [] for level in levels}
    try:
        with open_endpoint("prefill", kind, Credentials.of(ClusterKey.from_hex(key))) as sender:
            hello = msgspec.json.decode(child.stdout.readline(), type=Hello)
            for number in range(num_rounds + 1):
                order = levels if number % 2 else tuple(reversed(levels))
                for level in order:
                    received = _run_handoff(child, sender, level, hello.receivers[level])
                    if number:
                        found[level].append(received)
    finally:
        child.stdin.close()
        child.wait(TIMEOUT_S)
    return found


def _run_handoff(
    child: subprocess.Popen[bytes], sender: AgentEndpoint, level: str, receiver: WorkerRef
) -> Received:
    ticket = Ticket(new_ticket_id(), "bench", sender.ref, receiver, "push", ISSUER.issue(TIMEOUT_S))
    sender.agent.start_send(
        SendOrder(
            ticket=ticket,
            prompt_hash=b"h" * 32,
            num_tokens=NUM_TOKENS,
            num_ready_tokens=NUM_TOKENS,
            blocks=random_blocks(1),
            deadline=Instant(CLOCK.now() + TIMEOUT_S),
            trace=make_trace("prefill"),
        )
    )
    sender.agent.prefill_done(ticket.id, SampledToken(1))
    cpu = time.process_time()
    child.stdin.write(msgspec.json.encode(Receive(level, ticket)) + b"\n")
    child.stdin.flush()
    received = msgspec.json.decode(child.stdout.readline(), type=Received)
    sender.wait()
    received.cpu_s += time.process_time() - cpu
    return received


def main() -> None:
    """The child: receivers, each of its own level, that take in what they are told to."""
    kind, *levels = sys.argv[1:]
    key = Credentials.of(ClusterKey.from_hex(os.environ["BENCH_KEY"]))
    from contextlib import ExitStack  # noqa: PLC0415 - the child's alone

    is_on_this_host = AgentContext.is_on_this_host
    AgentContext.is_on_this_host = lambda context, peer: (  # type: ignore[method-assign]
        context.me.worker != f"decode-{KEYED}" and is_on_this_host(context, peer)
    )
    with ExitStack() as stack:
        endpoints = {
            level: stack.enter_context(
                open_endpoint(f"decode-{level}", kind, key, "full" if level == KEYED else level)
            )  # type: ignore[arg-type]
            for level in levels
        }
        hello = Hello({level: end.ref for level, end in endpoints.items()})
        sys.stdout.buffer.write(msgspec.json.encode(hello) + b"\n")
        sys.stdout.buffer.flush()
        for line in sys.stdin.buffer:
            receive = msgspec.json.decode(line, type=Receive)
            received = _receive(endpoints[receive.level], receive.ticket)
            sys.stdout.buffer.write(msgspec.json.encode(received) + b"\n")
            sys.stdout.buffer.flush()


def _receive(end: AgentEndpoint, ticket: Ticket) -> Received:
    trace, cpu, begun = make_trace("decode"), time.process_time(), time.perf_counter()
    end.agent.start_receive(
        ReceiveOrder(
            ticket=ticket,
            prompt_hash=b"h" * 32,
            start=0,
            num_tokens=NUM_TOKENS,
            blocks=random_blocks(2),
            deadline=Instant(CLOCK.now() + TIMEOUT_S),
            trace=trace,
        )
    )
    events = end.wait()
    seconds = time.perf_counter() - begun
    if not isinstance(events[0], KVLanded):
        raise RuntimeError(f"it did not land: {events}")  # noqa: TRY004
    verified = sum(trace.verified_bytes.values())
    return Received(seconds, verified, time.process_time() - cpu)


if __name__ == "__main__":
    main()
