"""Copying and verifying on the receiver: one pass over cache-sized parts, against two passes.

Workload S (8,192 pages of 32 KiB, 16 layers) is read over `shared` by one process from memory that
the same process owns, layer by layer as in a handoff, and compared with its digests. CPU seconds of
the reader alone, with digests made before. Used by `bench_verification.py --part copy`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from digest_and_send import PROMPTS, Side
from verified_handoffs import LAYOUT, NUM_TOKENS, random_blocks

from baton.auth.credentials import Credentials
from baton.handoff.incoming import DigestVerifier
from baton.handoff.write_batches import WriteBatchBuilder
from baton.kv.copies import CopyPlanner, PagedSequence
from baton.transfer.interface import PageRead, ReadCompleted, RemoteAttached

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.handoff.messages import Notification


def measure_copies(num_rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round, the three ways taking turns."""
    with ExitStack() as closing:
        key = Credentials.generate()
        prompt = replace(PROMPTS[0], num_places=1)
        owner, reader = Side(prompt, key, closing), Side(prompt, key, closing)
        rng = np.random.default_rng(0)
        for pages in owner.pages:
            pages[:] = rng.integers(0, 256, pages.shape, np.uint8)
        remote = reader.transport.attach(owner.descriptor)
        while not any(isinstance(e, RemoteAttached) for e in reader.transport.poll()):
            owner.transport.poll()
        for _ in range(256):  # idle polls enter pages into the page table
            reader.transport.poll()
        ways = _make_ways(owner, reader, remote)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(num_rounds + 1):
            for name, run in ways.items():
                begun = time.process_time()
                run()
                if number:
                    found[name].append(time.process_time() - begun)
        owner.pages.clear()
        reader.pages.clear()
    return found


def _make_ways(owner: Side, reader: Side, remote: int) -> dict[str, Callable[[], None]]:
    source = PagedSequence(LAYOUT, random_blocks(1))
    target = PagedSequence(LAYOUT, random_blocks(2))
    builder = WriteBatchBuilder(owner.pages, source, target)
    layers = range(LAYOUT.num_layers)
    batches = list(builder.build(layers, 0, NUM_TOKENS))
    notifications = [builder.digest(batch) for batch in batches]
    pairs = list(zip(source.table.blocks.tolist(), target.table.blocks.tolist(), strict=True))

    def copy() -> None:
        for layer in layers:
            source_pages, target_pages = owner.pages[layer], reader.pages[layer]
            for src, dst in pairs:
                target_pages[dst] = source_pages[src]

    def read(*, in_one_pass: bool) -> None:
        planner = CopyPlanner(LAYOUT, LAYOUT)
        verifier = DigestVerifier(reader.pages, target, LAYOUT)
        for notification in notifications:
            _read_layer(notification, planner, verifier, in_one_pass=in_one_pass)

    def _read_layer(
        notification: Notification,
        planner: CopyPlanner,
        verifier: DigestVerifier,
        *,
        in_one_pass: bool,
    ) -> None:
        tokens = {"start": notification.start, "stop": notification.stop}
        copies = planner.plan(source, target, notification.layer, **tokens)
        begun = verifier.begin(copies.layers, **tokens) if in_one_pass else None
        copied = None if begun is None else begun.add_pages
        handle = reader.region.handle
        reader.transport.read(  # type: ignore[attr-defined] # it reads
            PageRead(remote, handle, copies, copied=copied)
        )
        while not any(isinstance(event, ReadCompleted) for event in reader.transport.poll()):
            pass
        if verifier.verify(notification, begun=begun).wrong_layers:
            raise RuntimeError("other bytes arrived")

    return {
        "memcpy": copy,
        "two passes": lambda: read(in_one_pass=False),
        "one pass": lambda: read(in_one_pass=True),
    }
