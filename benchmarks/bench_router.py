"""What a placement costs: names of a prompt's blocks, who holds them, the policy, the events.

    hash        16,384 tokens in blocks of 16, an array in, 1,024 names out
    find        a prompt of 1,000 blocks among 64 and 512 workers that hold all of it (all), each
                another share of it (graded), or of which one holds it (one)
    place       policy `cost` and `prefix` among 256 workers of both roles, half of them busy, half
                of them with some of the prompt cached; and with a store for each 8 of them, that
                has all or some of it
    find        the same of a prompt of 16,000 tokens in stores, where it is cached nowhere
    ingest      stored blocks, 64 in an event: as plain objects, and from the publishers' bytes

Where `dynamo._core` can be imported (ai-dynamo-runtime, for example installed by
`pip install --no-deps --target FOLDER ai-dynamo-runtime==1.6.1`), its hashes and its RadixTree do
the same in turns. Of each figure the median and the 99th percentile.

    PYTHONPATH=FOLDER python benchmarks/bench_router.py --json benchmarks/results/router.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from run_record import write_record

from baton.auth.ticket import WorkerRef
from baton.events.blocks import (
    DEFAULT_MEDIUM,
    BlockStored,
    EntriesStored,
    EventDomain,
    TiersListed,
    pack_ids,
    pack_names,
)
from baton.events.journal import JournalPage
from baton.events.wire import decode_message, decode_page, encode_page
from baton.gateway.process import YOUNG_OBJECTS
from baton.ids import Epoch, StoreId, WorkerId
from baton.kv.prefix_names import PrefixNames
from baton.protocol.worker_http import Role
from baton.router.fleet import Fleet, WorkerView
from baton.router.load import FleetLoad
from baton.router.placement import POLICIES, Placement, PlacementRequest
from baton.router.prefix_index import PrefixIndex
from baton.router.prefixes import ModelPrefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.router.placement import PlacementPolicy
    from baton.router.worker_prefixes import WorkerPrefixes

try:
    from dynamo import _core as dynamo
except ImportError:
    dynamo = None

BLOCK_SIZE = 16
NUM_BLOCKS = 1000
ENTRY_SIZE = 64
BLOCKS_PER_EVENT = 64
MODEL = "demo"
DOMAIN = EventDomain("bench/sha256")
NAMES = PrefixNames(bytes(32))
RNG = np.random.default_rng(16)


class Figures:
    """Seconds of each arm, by name; arms of one row are interleaved."""

    def __init__(self, repetitions: int) -> None:
        self.repetitions = repetitions
        self.rows: dict[str, dict[str, float | int]] = {}

    def add(self, arms: dict[str, Callable[[], object]], *, per: int = 1) -> None:
        """Time them in turns. `per` is how many things one call does: then it is a rate, too."""
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for arm in arms.values():
            arm()
        gc.collect()
        gc.disable()
        for _ in range(self.repetitions):
            for name, arm in arms.items():
                began = time.perf_counter()
                arm()
                seconds[name].append(time.perf_counter() - began)
        gc.enable()
        for name, times in seconds.items():
            p50, p99 = statistics.median(times), float(np.quantile(times, 0.99))
            row: dict[str, float | int] = {"p50_us": p50 * 1e6, "p99_us": p99 * 1e6}
            if per > 1:
                row["per_second"] = per / p50
            self.rows[name] = row


def bench_hash(figures: Figures) -> None:
    """Names of a prompt's blocks."""
    ids = RNG.integers(0, 128_000, 16_384).astype(np.int32)
    root, listed = NAMES.root(""), ids.tolist()
    arms: dict[str, Callable[[], object]] = {"hash": lambda: NAMES.of(ids, BLOCK_SIZE, root)}
    if dynamo is not None:
        arms["hash · Dynamo"] = lambda: dynamo.compute_block_hash_for_seq(listed, BLOCK_SIZE)
    figures.add(arms)


def bench_find(figures: Figures, num_workers: int, kind: str) -> None:
    """Who holds a prompt's blocks."""
    ids = RNG.integers(0, 128_000, NUM_BLOCKS * BLOCK_SIZE).astype(np.int32)
    names, index = NAMES.of(ids, BLOCK_SIZE, NAMES.root("")), PrefixIndex()
    held = {
        worker: {
            "all": NUM_BLOCKS,
            "graded": NUM_BLOCKS * (worker + 1) // num_workers,
            "one": NUM_BLOCKS if worker == 0 else 0,
        }[kind]
        for worker in range(num_workers)
    }
    for worker, num in held.items():
        index.store(WorkerId(f"worker-{worker}"), names[:num], None)
    expected = {f"worker-{worker}": num for worker, num in held.items() if num}
    if index.find_matches(names) != expected:
        raise AssertionError("wrong matches")
    row = f"find, {num_workers} workers, {kind}"
    arms: dict[str, Callable[[], object]] = {row: lambda: index.find_matches(names)}
    if dynamo is not None:
        tree, hashes = dynamo.RadixTree(), dynamo.compute_block_hash_for_seq(ids.tolist(), 16)
        for worker, num in held.items():
            if num:
                tree.apply_event(worker, _dynamo_event(hashes[:num]))
        found = tree.find_matches(hashes).scores
        if {worker: num for (worker, _), num in found.items()} != {
            w: n for w, n in held.items() if n
        }:
            raise AssertionError("wrong matches of Dynamo's")
        arms[f"{row} · Dynamo"] = lambda: tree.find_matches(hashes)
    figures.add(arms)


def bench_find_stored(figures: Figures) -> None:
    """A prompt of 16,000 tokens in stores: 8 workers share one, or each has two tiers."""
    ids = RNG.integers(0, 128_000, 16_000).astype(np.int32)
    naming = bytes(16)
    by = PrefixNames(naming)
    names = by.of(ids[:-1], ENTRY_SIZE, by.root(""))
    arms: dict[str, Callable[[], object]] = {}
    for row, tiers_of in (
        ("no store", lambda _: ()),
        ("32 stores", lambda at: (_tier(at // 8),)),
        ("256 tiers above one", lambda at: (_tier(1 + at), _tier(0))),
    ):
        prefixes = ModelPrefixes(NAMES)
        for at in range(256):
            feed, tiers = prefixes.follow(WorkerId(f"worker-{at}")), tiers_of(at)
            feed.apply(TiersListed(tiers))
            for tier in tiers:
                num = int(RNG.integers(100, len(names)))
                feed.apply(EntriesStored(tier, naming, ENTRY_SIZE, pack_names(names[:num])))
        arms[f"find, 16,000 tokens, 256 workers, {row}"] = partial(prefixes.find, ids, "", 0.0)
    figures.add(arms)


def _tier(number: int) -> StoreId:
    return StoreId(f"{number:032x}")


def bench_place(figures: Figures) -> None:
    """The policies that look at what is cached."""
    fleet = Fleet.of(_view(at) for at in range(256))
    decodes, load, now = fleet.models[MODEL].decodes, FleetLoad(), 0.0
    for at, worker in enumerate(decodes):
        for _ in range(at % 8 if at % 2 else 0):
            running = load.begin(Placement(None, worker), 1000, now)
            running.first_token(now + 0.1)
    cached = {w.id: 16 * int(RNG.integers(1, 900)) for w in decodes[::2]}
    of_stores = [64 * int(RNG.integers(100, 249)) for _ in range(32)]
    stored = {w.id: of_stores[at // 8] for at, w in enumerate(decodes)}
    numbers = count()
    arms: dict[str, Callable[[], object]] = {}
    for name, found in product(("cost", "prefix"), ({}, stored)):
        policy = POLICIES.build(name, {})("auto")

        def place(
            policy: PlacementPolicy = policy, found: Mapping[WorkerId, int] = found
        ) -> object:
            at = now + next(numbers) * 1e-3
            request = PlacementRequest(
                MODEL, num_prompt_tokens=16_000, at=at, cached=cached, stored=found
            )
            return policy.place(fleet, request, load)

        arms[f"place, 256 workers, {name}{', 32 stores' if found else ''}"] = place
    figures.add(arms)


def bench_ingest(figures: Figures) -> None:
    """Events of stored blocks."""
    num_events, fresh = 64, count()
    payloads: list[bytes] = []
    pages: list[bytes] = []
    of_store: list[bytes] = []

    def make() -> list[BlockStored]:
        events: list[BlockStored] = []
        payloads.clear()
        pages.clear()
        of_store.clear()
        for _ in range(num_events):
            size = BLOCKS_PER_EVENT * BLOCK_SIZE
            ids = tuple(RNG.integers(0, 128_000, size).tolist())
            hashes = tuple(next(fresh) for _ in range(BLOCKS_PER_EVENT))
            packed = pack_ids(ids)
            events.append(BlockStored(DOMAIN, hashes, None, packed, BLOCK_SIZE, DEFAULT_MEDIUM, 0))
            event = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": ids,
                "block_size": BLOCK_SIZE,
                "medium": DEFAULT_MEDIUM,
            }
            payloads.append(msgspec.msgpack.encode((0.0, [event], None)))
            pages.append(encode_page(JournalPage(1, is_whole=False, events=(events[-1],))))
            names = pack_names(RNG.integers(0, 1 << 63, BLOCKS_PER_EVENT).tolist())
            entries = EntriesStored(_tier(0), bytes(16), ENTRY_SIZE, names)
            of_store.append(encode_page(JournalPage(1, is_whole=False, events=(entries,))))
        return events

    per = num_events * BLOCKS_PER_EVENT
    objects, wire, own, stored, peer = [], [], [], [], []
    for _ in range(figures.repetitions // 20 + 2):
        events = make()
        feed = ModelPrefixes(NAMES).follow(WorkerId("worker"))
        objects.append(_time(lambda e=events, f=feed: [f.apply(each) for each in e]))
        feed = ModelPrefixes(NAMES).follow(WorkerId("worker"))
        wire.append(_time(lambda f=feed: [_take(f, payload) for payload in payloads]))
        feed = ModelPrefixes(NAMES).follow(WorkerId("worker"))
        own.append(_time(lambda f=feed: [_take_page(f, page) for page in pages]))
        feed = ModelPrefixes(NAMES).follow(WorkerId("worker"))
        feed.apply(TiersListed((_tier(0),)))
        stored.append(_time(lambda f=feed: [_take_page(f, page) for page in of_store]))
        if dynamo is not None:
            tree = dynamo.RadixTree()
            bodies = [
                _dynamo_event(
                    dynamo.compute_block_hash_for_seq(
                        np.frombuffer(e.packed_ids, np.int32).tolist(), BLOCK_SIZE
                    )
                )
                for e in events
            ]
            peer.append(_time(lambda t=tree, b=bodies: _take_dynamo(t, b)))
    arms = {
        "ingest, objects": objects,
        "ingest, vLLM's bytes": wire,
        "ingest, a Baton worker's bytes": own,
        "ingest, entries of a store, bytes": stored,
        "ingest, bytes · Dynamo": peer,
    }
    for name, times in arms.items():
        if times:
            p50 = statistics.median(times)
            figures.rows[name] = {
                "p50_us": p50 / per * 1e6,
                "p99_us": max(times) / per * 1e6,
                "per_second": per / p50,
            }


def _take(feed: WorkerPrefixes, payload: bytes) -> None:
    message = decode_message([b"", bytes(8), payload], DOMAIN)
    for event in message.batch.events:
        feed.apply(event)


def _take_page(feed: WorkerPrefixes, page: bytes) -> None:
    for event in decode_page(page, DOMAIN).events:
        feed.apply(event)


def _take_dynamo(tree: dynamo.RadixTree, bodies: list[bytes]) -> None:
    for body in bodies:
        tree.apply_event(0, body)
    tree.find_matches([1])  # answered once its own thread has applied them


def _time(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _dynamo_event(hashes: list[int]) -> bytes:
    blocks = [{"block_hash": each % 2**63, "tokens_hash": each} for each in hashes]
    stored = {"parent_hash": None, "blocks": blocks}
    return json.dumps({"event_id": 1, "dp_rank": 0, "data": {"stored": stored}}).encode()


def _view(number: int) -> WorkerView:
    ref = WorkerRef(WorkerId(f"worker-{number}"), Epoch("e" * 32), f"10.0.{number}.1:1")
    return WorkerView(ref, Role.BOTH, MODEL, "f", frozenset({"tcp"}), available=True)


def main() -> None:
    """Measure all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])  # as in a gateway
    figures = Figures(options.repetitions)
    bench_hash(figures)
    for num_workers in (64, 512):
        for kind in ("all", "graded", "one"):
            bench_find(figures, num_workers, kind)
    bench_find_stored(figures)
    bench_place(figures)
    bench_ingest(figures)
    table = Table("", "p50, us", "p99, us", "per second")
    for name, row in figures.rows.items():
        rate = f"{row['per_second']:,.0f}" if "per_second" in row else ""
        table.add_row(name, f"{row['p50_us']:.2f}", f"{row['p99_us']:.2f}", rate)
    Console().print(table)
    write_record(options.json, repetitions=options.repetitions, rows=figures.rows)


if __name__ == "__main__":
    main()
