"""What a handoff costs by reference and by push, agents alone: no engine, KV in place already.

    python benchmarks/bench_handoff_cost.py [--repetitions 9] [--json FILE]
        [--layers 16] [--kv-heads 16] [--lengths 512,1024,2048,4096,8192] [--transport shared]

CPU time of both agents' threads from `expect` to `KVLanded`, and the time on the wall. In a real
handoff most of a push hides behind prefill; what is counted here is the work, hidden or not.
`first look` is the CPU time of gathering all borrowed pages once, over that of doing it again:
what the page table costs whoever attends over a peer's pages for the first time.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from run_record import write_record

from baton.auth.credentials import Credentials
from baton.auth.ticket import Ticket, TicketIssuer, WorkerRef, seal, unseal
from baton.clock import Instant, MachineClock
from baton.handoff.agent import HandoffAgent
from baton.handoff.interface import (
    ExportReleased,
    KVExported,
    KVFailed,
    KVLanded,
    KVSent,
    ReceiveOrder,
    SampledToken,
    SendFailed,
    SendOrder,
)
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.handoff.peer_transports import LinkOptions
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.kv.copies import BlockTable
from baton.kv.layout import KVLayout
from baton.telemetry.trace import RequestSpan
from baton.transfer.interface import TRANSPORTS, TransportContext
from baton.transfer.peer_mappings import PeerMappings
from baton.transfer.region import allocate_shared_region, release_region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.auth.ticket import HandoffMode

EventT = TypeVar("EventT")

BLOCK_SIZE = 16
HEAD_DIM = 16
"""With the 16 layers and heads of the defaults 32 KiB a token, in pages of 32 KiB."""
TIMEOUT_S = 60.0
CLOCK = MachineClock()
ISSUER = TicketIssuer(CLOCK)
console = Console(stderr=True)


@dataclass(frozen=True)
class Sample:
    """One handoff. `first_look_s` and `again_s` are None where it was pushed."""

    mode: str
    num_tokens: int
    cpu_s: float
    wall_s: float
    first_look_s: float | None
    again_s: float | None


@dataclass(eq=False)
class Node:
    """An agent, its pages, and where they go on."""

    agent: HandoffAgent
    peer_mappings: PeerMappings
    layout: KVLayout
    ref: WorkerRef
    woken: threading.Event
    credentials: Credentials

    def wait(self, *kinds: type[EventT]) -> EventT:
        """The next event of one of these kinds."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self.woken.wait(1.0)
            self.woken.clear()
            for event in self.agent.poll():
                if type(event) in {KVFailed, SendFailed}:
                    raise RuntimeError(str(event))
                if isinstance(event, kinds):
                    return event
        raise RuntimeError(f"none of {kinds} within {TIMEOUT_S} s")

    def cpu_s(self) -> float:
        """CPU time of the agent's thread."""
        ident = next(t.ident for t in threading.enumerate() if t is self.agent._thread)  # noqa: SLF001
        return time.clock_gettime(time.pthread_getcpuclockid(ident))


@contextmanager
def node(
    name: str, key: Credentials, transport: str, layout: KVLayout, num_blocks: int
) -> Iterator[Node]:
    """An agent over one transport, with pages that hold no KV of anybody."""
    region = allocate_shared_region([
        (num_blocks, layout.page_bytes(layer)) for layer in range(layout.num_layers)
    ])
    peer_mappings, epoch, woken = PeerMappings(region), new_epoch(), threading.Event()
    context = TransportContext(credentials=key, epoch=epoch, bind_host="127.0.0.1", clock=CLOCK)
    agent = HandoffAgent(
        AgentOptions(
            worker=WorkerId(name),
            epoch=epoch,
            fingerprint="f" * 64,
            views=(KVView(layout, region, peer_mappings=peer_mappings),),
            transports=(TRANSPORTS.build(transport, {})(context),),
            credentials=key,
            clock=CLOCK,
            links=LinkOptions("listed"),
        )
    )
    agent.start(woken.set)
    try:
        ref = WorkerRef(WorkerId(name), epoch, agent.address)
        yield Node(agent, peer_mappings, layout, ref, woken, key)
    finally:
        agent.stop()
        peer_mappings.close()
        release_region(region)


def run_handoff(prefill: Node, decode: Node, mode: HandoffMode, num_tokens: int) -> Sample:
    """One handoff of a prompt that is computed already."""
    signed = Ticket(
        new_ticket_id(), "bench", prefill.ref, decode.ref, mode, ISSUER.issue(TIMEOUT_S)
    )
    # As in a worker, whose HTTP server has read it with the request.
    ticket = unseal(seal(signed, prefill.credentials), prefill.credentials)
    table = BlockTable(0, np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int64))
    common = {"ticket": ticket, "prompt_hash": bytes(32), "num_tokens": num_tokens}
    common |= {"blocks": table, "deadline": Instant(CLOCK.now() + TIMEOUT_S)}
    trace = RequestSpan(request_id="bench", worker="", epoch="", role="decode")
    prefill.agent.start_send(
        SendOrder(**common, num_ready_tokens=num_tokens, trace=msgspec.structs.replace(trace))
    )
    prefill.agent.prefill_done(ticket.id, SampledToken(1))
    time.sleep(0.05)
    cpu_s, began = prefill.cpu_s() + decode.cpu_s(), time.monotonic()
    decode.agent.start_receive(ReceiveOrder(**common, start=0, trace=trace))
    landed = decode.wait(KVLanded)
    wall_s = time.monotonic() - began
    cpu_s = prefill.cpu_s() + decode.cpu_s() - cpu_s
    prefill.wait(KVSent, KVExported)
    looks: list[float | None] = [None, None]
    if mode == "reference":
        if len(landed.imported) != len(table.blocks) - 1:
            raise RuntimeError(f"not by reference: {trace.reroutes}")
        looks = [attend(decode, landed.imported) for _ in range(2)]
        decode.agent.release_imported(ticket.id)
        prefill.wait(ExportReleased)
    return Sample(mode, num_tokens, cpu_s, wall_s, *looks)


def attend(decode: Node, blocks: tuple[int, ...]) -> float:
    """CPU seconds of gathering these pages of all layers."""
    began = time.thread_time()
    for layer in range(decode.layout.num_layers):
        decode.peer_mappings.view(layer)[list(blocks)]
    return time.thread_time() - began


def main() -> None:
    """Run the benchmark, print a line for each length and mode, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--transport", choices=["shared", "tcp"], default="shared")
    options = parser.parse_args()
    lengths = [int(word) for word in options.lengths.split(",")]
    if min(lengths) <= BLOCK_SIZE:
        parser.error(f"--lengths: above {BLOCK_SIZE}, as a prompt's last block is never lent")
    modes: tuple[HandoffMode, ...] = ("push", "reference")
    if options.transport != "shared":
        modes = ("push",)  # the others do not lend
    layout = KVLayout.gqa(
        options.layers, options.kv_heads, HEAD_DIM, block_size=BLOCK_SIZE, dtype="float32"
    )
    num_blocks = 2 * -(-max(lengths) // BLOCK_SIZE)
    key, samples = Credentials.generate(), []
    with (
        node("prefill", key, options.transport, layout, num_blocks) as prefill,
        node("decode", key, options.transport, layout, num_blocks) as decode,
    ):
        for mode in modes:
            run_handoff(prefill, decode, mode, lengths[0])  # warm-up
        for num_tokens in lengths:
            for mode in modes:
                here = [
                    run_handoff(prefill, decode, mode, num_tokens)
                    for _ in range(options.repetitions)
                ]
                samples += here
                cpu_ms = sorted(1e3 * sample.cpu_s for sample in here)
                wall_ms = sorted(1e3 * sample.wall_s for sample in here)
                looks = [1e3 * (s.first_look_s - s.again_s) for s in here if s.again_s is not None]
                more = f"first look {looks[0]:+.1f} ms" if looks else ""
                console.print(
                    f"{num_tokens:5} tokens {mode:9} CPU {statistics.median(cpu_ms):7.2f} ms "
                    f"(least {cpu_ms[0]:.2f}), wall {statistics.median(wall_ms):7.1f} ms "
                    f"(least {wall_ms[0]:.1f}) {more}"
                )
    write_record(options.json, samples=samples)


if __name__ == "__main__":
    main()
