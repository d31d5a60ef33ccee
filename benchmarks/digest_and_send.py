"""Digesting and copying on the sender: one pass over cache-sized parts, against two passes.

Writes over `shared` between two transports of one process, batch by batch as a handoff makes them;
CPU seconds of the sending one alone, notification included. Pages are cold: each round writes other
ones of large pools. Used by `bench_verification.py --part send`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from verified_handoffs import CLOCK, LAYOUT

from baton.auth.credentials import Credentials
from baton.handoff.messages import encode
from baton.handoff.write_batches import WriteBatchBuilder
from baton.ids import new_epoch, new_ticket_id
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.layout import KVLayout
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    PageWrite,
    RemoteAttached,
    TransportContext,
    WriteCompleted,
    WriteGrant,
)
from baton.transfer.region import allocate_shared_region, release_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.handoff.write_batches import WriteBatch

IDLE_POLLS: Final = 1024
"""They enter the peer's pages into the page table."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """KV of `num_blocks` blocks of a layout, of pools with `num_places` times as many."""

    name: str
    layout: KVLayout
    num_blocks: int
    num_places: int

    @property
    def num_tokens(self) -> int:
        """Tokens that it has."""
        return self.num_blocks * self.layout.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of its KV."""
        return self.num_tokens * self.layout.bytes_per_token


PROMPTS: Final = (
    Prompt("workload S: 8,192 pages of 32 KiB, 16 layers", LAYOUT, 512, 4),
    Prompt(
        "128 tokens, 32 layers, pages of 64 KiB",
        KVLayout.gqa(32, 8, 128, block_size=16, dtype="bfloat16"),
        8,
        32,
    ),
    Prompt(
        "128 tokens, 16 layers, pages of 8 KiB",
        KVLayout.gqa(16, 2, 64, block_size=16, dtype="bfloat16"),
        8,
        128,
    ),
)


class Side:
    """A transport, its region, and the pages of each layer."""

    def __init__(self, prompt: Prompt, key: Credentials, closing: ExitStack) -> None:
        layout, self.epoch = prompt.layout, new_epoch()
        num_pages = prompt.num_blocks * prompt.num_places
        self.region = allocate_shared_region([
            (num_pages, layout.page_bytes(layer)) for layer in range(layout.num_layers)
        ])
        context = TransportContext(key, self.epoch, "127.0.0.1", CLOCK)
        self.transport = TRANSPORTS.build("shared", {})(context)
        closing.callback(release_region, self.region)
        closing.callback(self.transport.close)
        self.descriptor = self.transport.expose(self.region)
        self.pages = [view_pages(self.region.memory, array) for array in self.region.arrays]


def measure_sends(prompt: Prompt, num_rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round, the three ways taking turns."""
    with ExitStack() as closing:
        key, rng = Credentials.generate(), np.random.default_rng(0)
        sender, receiver = Side(prompt, key, closing), Side(prompt, key, closing)
        for pages in sender.pages:
            pages[:] = rng.integers(0, 256, pages.shape, np.uint8)
        remote = sender.transport.attach(receiver.descriptor)
        while not any(isinstance(e, RemoteAttached) for e in sender.transport.poll()):
            receiver.transport.poll()
        grant, every = new_ticket_id(), np.arange(len(sender.pages[0]))
        receiver.transport.open_grant(
            WriteGrant(grant, receiver.region.handle, sender.epoch, every)
        )
        for _ in range(IDLE_POLLS):
            sender.transport.poll()
            receiver.transport.poll()

        def send(batch: WriteBatch, builder: WriteBatchBuilder, *, in_one_pass: bool) -> None:
            late = builder.try_digest_in_copy(batch, None, CLOCK.now) if in_one_pass else None
            digested = b"" if late is not None else encode(builder.digest(batch))
            region = sender.region.handle
            sender.transport.submit(PageWrite(remote, grant, region, batch.copies, digested, late))
            if not any(isinstance(e, WriteCompleted) for e in sender.transport.poll()):
                raise RuntimeError("a write did not complete within its submission")

        def copy(batch: WriteBatch, builder: WriteBatchBuilder) -> None:
            del builder
            for layer in batch.copies.layers:
                source, target = sender.pages[layer], receiver.pages[layer]
                for group in batch.copies.groups:
                    pairs = zip(group.src_pages.tolist(), group.dst_pages.tolist(), strict=True)
                    for src, dst in pairs:
                        target[dst] = source[src]

        ways: dict[str, Callable[[WriteBatch, WriteBatchBuilder], None]] = {
            "memcpy": copy,
            "two passes": lambda batch, builder: send(batch, builder, in_one_pass=False),
            "one pass": lambda batch, builder: send(batch, builder, in_one_pass=True),
        }
        found = _take_turns(prompt, ways, sender, receiver, num_rounds)
        sender.pages.clear()
        receiver.pages.clear()
    return found


def _take_turns(
    prompt: Prompt,
    ways: dict[str, Callable[[WriteBatch, WriteBatchBuilder], None]],
    sender: Side,
    receiver: Side,
    num_rounds: int,
) -> dict[str, list[float]]:
    """The first round of each warms up; what arrives is compared with what was sent."""
    tables = [_places(prompt, seed) for seed in (1, 2)]
    found: dict[str, list[float]] = {name: [] for name in ways}
    turn = 0
    for number in range(num_rounds + 1):
        for name, run in ways.items():
            sides = [PagedSequence(prompt.layout, table[turn % len(table)]) for table in tables]
            turn += 1
            builder = WriteBatchBuilder(sender.pages, *sides)
            batches = list(builder.build(range(prompt.layout.num_layers), 0, prompt.num_tokens))
            begun = time.process_time()
            for batch in batches:
                run(batch, builder)
            took = time.process_time() - begun
            if number:
                found[name].append(took)
            events = receiver.transport.poll()
            if name != "memcpy" and sum(isinstance(e, Arrived) for e in events) != len(batches):
                raise RuntimeError("a notification did not arrive")
            for ours, theirs in zip(sender.pages, receiver.pages, strict=True):
                blocks = [side.table.blocks[-1] for side in sides]
                if (ours[blocks[0]] != theirs[blocks[1]]).any():
                    raise RuntimeError("other bytes arrived")
    return found


def _places(prompt: Prompt, seed: int) -> list[BlockTable]:
    """Random blocks, of which no two tables have the same."""
    blocks = np.random.default_rng(seed).permutation(prompt.num_blocks * prompt.num_places)
    return [BlockTable(0, each) for each in np.split(blocks.astype(np.int64), prompt.num_places)]
