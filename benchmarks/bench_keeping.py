"""What does keeping KV in a store cost the answers that an engine computes meanwhile?

    python benchmarks/bench_keeping.py --json benchmarks/results/keeping.json

Embedded engines of one random model, all in this process, without a gateway. While two requests are
decoded, a prompt of 512 tokens that no engine has seen comes every 250 ms; its answer has one
token, and then it is kept: 16 entries of 64 KiB in tier `shared`. Configurations:

    none       no store
    looked for a store, nothing is kept (`engine.max_kept_share = 0`)
    paced      `store.keep_share` as it is by default, or `--share`
    unpaced    `store.keep_share = 1`: kept at once

They take turns, in the other order every second round, and one alone has requests at a time.
*Interval*: between two tokens of an answer, with prompts computed in between. *Share*:
of a core, for keeping. *ms an entry*: processor time of keeping it; *CPU ms*: of all that its
thread did. *Waits*: how often the engine's thread slept, by the kernel's count: other work on the
machine is not in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_prefixes import MODEL
from random_model import make_model
from rich import box
from rich.console import Console
from rich.table import Table
from run_record import write_record

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant, MachineClock
from baton.config.sections import StoreSection
from baton.engines.interface import (
    Colocated,
    EngineContext,
    EngineUpdate,
    GenerationRequest,
    NewToken,
    SamplingParams,
)
from baton.engines.transformers.engine import load_engine
from baton.engines.transformers.options import TransformersOptions
from baton.handoff.dispatcher import open_handoffs
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.handoff.pool_mode.prefix_store import PrefixCounts
from baton.handoff.pool_mode.store_access import open_store_access
from baton.ids import RequestId, WorkerId, new_epoch
from baton.telemetry.trace import RequestSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOCK = MachineClock()
BLOCK_TOKENS = 32
PROMPT_TOKENS = 512
EVERY_S = 0.25
NUM_DECODING = 2
ARMS = ("none", "looked for", "paced", "unpaced")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Run:
    """One turn of one configuration. Times in ms; entries and `share` of that turn."""

    arm: str
    interval_p50_ms: float
    interval_p99_ms: float
    interval_mean_ms: float
    ttft_p50_ms: float
    num_stored: int
    num_dropped: int
    num_waiting: int
    share: float
    entry_ms: float
    entry_cpu_ms: float
    waits_per_token: float


class Node:
    """An engine, and its store if it has one."""

    def __init__(self, arm: str, model: Path, folder: Path, share: float | None) -> None:
        options = TransformersOptions(
            num_threads=1,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            num_blocks=1024,
            max_kept_share=0.0 if arm == "looked for" else 0.25,
        )
        self.arm = arm
        self.engine = load_engine(options, EngineContext(model, CLOCK))
        info, key = self.engine.info, ClusterKey.generate()
        view = KVView(info.layout, self.engine.region)
        access = None
        if arm != "none":
            place = folder / arm.replace(" ", "-")
            place.mkdir()
            shared = {"directory": str(place), "capacity_bytes": 512 << 20}
            section = StoreSection(
                tiers=("shared",), block_size=BLOCK_TOKENS, options={"shared": shared}
            )
            chosen = 1.0 if arm == "unpaced" else share or section.keep_share
            section = StoreSection(
                tiers=section.tiers,
                block_size=section.block_size,
                options=section.options,
                keep_share=chosen,
            )
            access = open_store_access(section, view, key=key, clock=CLOCK, keeps_prefixes=True)
        self.handoffs = open_handoffs(
            AgentOptions(
                worker=WorkerId(arm.replace(" ", "-")),
                epoch=new_epoch(),
                fingerprint=info.fingerprint,
                views=(view,),
                transports=(),
                credentials=Credentials.of(key),
                clock=CLOCK,
            ),
            access,
        )
        before = set(threading.enumerate())
        self.handoffs.start(self.engine.wake)
        started = set(threading.enumerate()) - before
        self.pool_thread = next((t for t in started if t.name == "handoff-pool"), None)
        self.tokens: dict[RequestId, list[float]] = {}
        before = set(threading.enumerate())
        self.engine.start(self.sink, self.handoffs)
        (self.engine_thread,) = set(threading.enumerate()) - before

    def sink(self, updates: Sequence[EngineUpdate]) -> None:
        """Note when each token came; from the engine's thread."""
        now = time.perf_counter()
        for update in updates:
            if isinstance(update, NewToken):
                self.tokens[update.request].append(now)

    def submit(self, name: str, prompt: np.ndarray, max_tokens: int) -> RequestId:
        """Ask for an answer."""
        request = RequestId(name)
        self.tokens[request] = []
        trace = RequestSpan(request_id=name, worker=self.arm, epoch="", role="colocated")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        deadline = Instant(CLOCK.now() + TIMEOUT_S)
        self.engine.submit(
            GenerationRequest(request, prompt, sampling, Colocated(), "", deadline, trace)
        )
        return request

    def read_cpu_s(self) -> float:
        """CPU time of the thread that keeps."""
        if self.pool_thread is None or self.pool_thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self.pool_thread.ident))

    def read_num_waits(self) -> int:
        """How often the engine's thread has slept: for the interpreter, mostly."""
        status = Path(f"/proc/self/task/{self.engine_thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    @property
    def counts(self) -> PrefixCounts:
        """Of the store."""
        return (
            PrefixCounts() if self.handoffs.store is None else self.handoffs.store.prefixes.counts
        )

    def stop(self) -> None:
        """End all threads."""
        self.handoffs.stop()
        self.engine.stop(TIMEOUT_S)


def measure(node: Node, seconds: float, rng: np.random.Generator) -> Run:
    """One turn, and what it left to be kept afterwards."""
    decoding = [
        node.submit(
            f"decoding-{rng.integers(1 << 60)}", rng.integers(300, 4000, 64, np.int32), 7000
        )
        for _ in range(NUM_DECODING)
    ]
    wait_for(lambda: all(len(node.tokens[each]) > 5 for each in decoding))
    counts = node.counts
    stored, dropped, kept_s = counts.num_stored, counts.num_dropped, counts.kept_s
    num_waits = node.read_num_waits()
    cpu_s, began = node.read_cpu_s(), time.perf_counter()
    prompts: dict[RequestId, float] = {}
    for number in range(int(seconds / EVERY_S)):
        time.sleep(max(0.0, began + number * EVERY_S - time.perf_counter()))
        asked = time.perf_counter()
        prompt = rng.integers(300, 4000, PROMPT_TOKENS, np.int32)
        prompts[node.submit(f"prompt-{rng.integers(1 << 60)}", prompt, 1)] = asked
    wait_for(lambda: all(node.tokens[each] for each in prompts))
    took_s = time.perf_counter() - began
    num_stored, took_to_keep_s = counts.num_stored - stored, counts.kept_s - kept_s
    took_cpu_s = node.read_cpu_s() - cpu_s
    num_dropped, num_waiting = counts.num_dropped - dropped, counts.num_waiting
    for each in decoding:
        node.engine.cancel(each)
    wait_for(lambda: node.engine.stats().num_running == 0 and counts.num_waiting == 0)
    since = [[t for t in node.tokens[each] if t >= began] for each in decoding]
    intervals = [1e3 * (b - a) for each in since for a, b in pairwise(each)]
    num_kept = max(1, num_stored)
    return Run(
        node.arm,
        statistics.median(intervals),
        float(np.quantile(intervals, 0.99)),
        statistics.fmean(intervals),
        statistics.median(1e3 * (node.tokens[each][0] - at) for each, at in prompts.items()),
        num_stored,
        num_dropped,
        num_waiting,
        took_to_keep_s / took_s,
        1e3 * took_to_keep_s / num_kept,
        1e3 * took_cpu_s / num_kept,
        (node.read_num_waits() - num_waits) / max(1, len(intervals)),
    )


def wait_for(condition) -> None:  # noqa: ANN001 - a function without arguments
    """Look every few milliseconds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("an engine has not answered")
        time.sleep(0.005)


def show(runs: list[Run]) -> None:
    """Medians over the rounds; intervals also over those of `none`, round by round."""
    columns = "interval p50, ms", "p99", "mean", "mean, of none", "TTFT, ms", "stored", "dropped"
    parts = "share", "ms an entry", "CPU ms", "waits a token"
    table = Table("store", *columns, *parts, box=box.MARKDOWN)
    base = [run.interval_mean_ms for run in runs if run.arm == "none"]
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        ratios = [run.interval_mean_ms / usual for run, usual in zip(own, base, strict=False)]
        table.add_row(
            arm,
            f"{statistics.median(run.interval_p50_ms for run in own):.2f}",
            f"{statistics.median(run.interval_p99_ms for run in own):.1f}",
            f"{statistics.median(run.interval_mean_ms for run in own):.2f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{statistics.median(run.ttft_p50_ms for run in own):.0f}",
            str(sum(run.num_stored for run in own)),
            str(sum(run.num_dropped for run in own)),
            f"{statistics.median(run.share for run in own):.1%}",
            f"{statistics.median(run.entry_ms for run in own):.2f}",
            f"{statistics.median(run.entry_cpu_ms for run in own):.2f}",
            f"{statistics.median(run.waits_per_token for run in own):.1f}",
        )
    Console(width=140).print(table)


def main() -> None:
    """Measure all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=float, default=4.0, help="seconds")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--share", type=float, help="`store.keep_share` of `paced`")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="print the table of such a file again")
    options = parser.parse_args()
    if options.read is not None:
        show([Run(**run) for run in json.loads(options.read.read_bytes())["runs"]])
        return
    rng, runs = np.random.default_rng(), list[Run]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        model = make_model(folder, MODEL)
        nodes = [Node(arm, model, memory, options.share) for arm in options.arms]
        for node in nodes:
            stack.callback(node.stop)
            measure(node, 1.0, rng)  # the first turn pays for what is made once
        for number in range(options.rounds):
            for node in reversed(nodes) if number % 2 else nodes:
                runs.append(measure(node, options.turn, rng))
                print(runs[-1], file=sys.stderr)
    show(runs)
    write_record(options.json, runs=runs)


if __name__ == "__main__":
    main()
