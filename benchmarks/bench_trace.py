"""What does a store save of real traffic? Mooncake's conversation trace, through real servers.

    python benchmarks/bench_trace.py TRACE --json benchmarks/results/trace.json
    python benchmarks/bench_trace.py TRACE --engine vllm --json benchmarks/results/trace-vllm.json

TRACE is `conversation_trace.jsonl` (FAST '25). One of `--sample` conversations is taken, with all
its requests in the whole hour, so that what requests share, and after how much other traffic, stays
as it was; their times are compressed to `--duration`, and lengths are divided by `--divide`.
Conversations are told apart by their second block: the first one is in every request.

Arms, each a worker of both roles behind a gateway of its own, and no difference but the store:

    none     the engine's prefix cache alone (`POOL_TOKENS` of KV)
    small    and a tier `shared` for a sixth of the different tokens that the sample has
    large    and one for all of them

and, to see what costs what (`--arms none large large-unpaced large-unkept`),

    large-unpaced   `large`, where all is kept at once (`store.keep_share = 1`)
    large-unkept    `large`, where prompts are looked for and nothing is kept

`baton bench serve` asks each arm the same, in another order every second round; each round has
prompts of its own. *Saved*: prompt tokens that were not computed, of all. *Kept*: of the entries of
what requests left and the store lacked, those that it then had. *Possible*: what a cache
without limits finds in the sample. *Good*: answers that began within `--ttft-ms`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from bench_prefixes import MODEL, SERVED
from completion_client import get
from random_model import make_model
from rich import box
from rich.console import Console
from rich.table import Table
from run_record import write_record
from serve_runs import run_serve

from baton.testing.fleet import Fleet, FleetProcess

BLOCK_TOKENS = 512
"""Of the trace."""
CONTEXT_TOKENS = 8192
TOKEN_BYTES = 2048
"""KV of a token of MODEL, in float32."""
POOL_TOKENS = 16_384
STEP_TOKENS = 512
"""vLLM's default of 8,192 makes steps of seconds on a CPU, in which no answer begins in time."""
ENTRIES = "baton_prefix_entries_total"
LARGE = 1.5
SHARES = {"none": None, "small": 1 / 6, "large": LARGE}
"""Capacity over the sample's different tokens: `large` has room for answers, too."""
PARTS: dict[str, dict[str, object]] = {
    "large-unpaced": {"store.keep_share": 1.0},
    "large-unkept": {"engine.max_kept_share": 0.0},
}
"""Settings of arms that are `large` otherwise."""


class Request(msgspec.Struct, frozen=True):
    """One line of the trace; `timestamp` in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def conversation(self) -> str:
        """The same for all turns of a conversation."""
        return str(self.hash_ids[1] if len(self.hash_ids) > 1 else self.timestamp)


@dataclass(frozen=True)
class Sample:
    """What is asked, and what of it a cache without limits would find (a share of tokens)."""

    requests: list[Request]
    num_too_long: int
    num_tokens: int
    num_different_tokens: int

    @property
    def possible(self) -> float:
        """The largest share that can be saved."""
        return 1 - self.num_different_tokens / self.num_tokens


@dataclass(frozen=True)
class Run:
    """What one arm gave in one round. Entries that embedded workers kept, and did not keep."""

    arm: str
    saved: float
    goodput_per_s: float
    good: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    num_failed: int
    client_problems: list[str]
    num_stored: float = 0.0
    num_dropped: float = 0.0


def take_sample(path: Path, one_of: int, divisor: int) -> Sample:
    """The requests of one of `one_of` conversations, chosen by a hash."""
    lines = path.read_bytes().splitlines()
    requests = [msgspec.json.decode(line, type=Request) for line in lines]
    chosen = [
        each
        for each in requests
        if int.from_bytes(hashlib.sha256(each.conversation.encode()).digest()[:4]) % one_of == 0
    ]
    fits = [
        each
        for each in chosen
        if (each.input_length + each.output_length) / divisor + len(each.hash_ids) < CONTEXT_TOKENS
    ]
    seen: set[int] = set()
    num_new = 0
    for each in fits:
        first_new = next((i for i, name in enumerate(each.hash_ids) if name not in seen), None)
        if first_new is not None:
            num_new += each.input_length - BLOCK_TOKENS * first_new
        seen.update(each.hash_ids)
    num_tokens = sum(each.input_length for each in fits)
    return Sample(fits, len(chosen) - len(fits), num_tokens // divisor, num_new // divisor)


def make_arms(
    engine: str, sample: Sample, block_tokens: int, memory: Path
) -> dict[str, dict[str, object]]:
    """Settings of each arm's worker; `memory` is a folder for the stores."""
    common: dict[str, object] = {
        "worker.engine": engine,
        "engine.num_threads": 1,
        "engine.dtype": "float32",
        "engine.block_size": block_tokens,
    }
    if engine == "vllm":
        common["engine.kv_cache_bytes"] = POOL_TOKENS * TOKEN_BYTES
        common["engine.arguments"] = ["--enable-prompt-tokens-details"]
        common["engine.max_num_batched_tokens"] = STEP_TOKENS
    else:
        common["engine.num_blocks"] = POOL_TOKENS // block_tokens
        common["engine.max_batch_tokens"] = STEP_TOKENS
    arms: dict[str, dict[str, object]] = {}
    for arm, share in (SHARES | dict.fromkeys(PARTS, LARGE)).items():
        arms[arm] = common
        if share is not None:
            (memory / arm).mkdir()
            arms[arm] = (
                common
                | PARTS.get(arm, {})
                | {
                    "store.tiers": ["shared"],
                    "store.block_size": block_tokens,
                    "store.options.shared.directory": str(memory / arm),
                    "store.options.shared.capacity_bytes": int(
                        share * sample.num_different_tokens * TOKEN_BYTES
                    ),
                }
            )
    return arms


def measure(
    arm: str,
    worker: FleetProcess,
    gateway: FleetProcess,
    trace: Path,
    speed: float,
    options: argparse.Namespace,
    seed: str,
) -> Run:
    """One run of `baton bench serve`."""
    entries = read_entries(worker)
    found = run_serve(
        gateway.url, "--model", SERVED, "--trace", str(trace),
        "--divide-lengths", str(options.divide),
        "--speed", str(speed), "--max-in-flight", "256", "--seed", seed,
        "--goodput", f"ttft:{options.ttft_ms}",
    )  # fmt: skip
    figures = found["figures"]
    return Run(
        arm,
        (figures["num_cached_tokens"] or 0) / figures["num_prompt_tokens"],
        figures["goodput"]["requests_per_s"],
        figures["goodput"]["share"],
        figures["ttft_s"]["p50"] * 1e3,
        figures["ttft_s"]["p99"] * 1e3,
        figures["tpot_s"]["p50"] * 1e3,
        figures["num_failed"],
        found["client"]["problems"],
        *(after - before for before, after in zip(entries, read_entries(worker), strict=True)),
    )


def read_entries(worker: FleetProcess) -> tuple[float, float]:
    """Entries that a worker has kept since its start, and that it had no room to keep."""
    lines = get(worker.url, "/metrics").splitlines()
    counted = [line.rpartition(" ") for line in lines if line.startswith(ENTRIES)]
    stored, dropped = (
        sum(float(value) for name, _, value in counted if f'result="{result}"' in name)
        for result in ("stored", "dropped")
    )
    return stored, dropped


def main() -> None:
    """Measure all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--read", type=Path, help="print the table of such a file again")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--arms", nargs="*", choices=(*SHARES, *PARTS), default=list(SHARES))
    parser.add_argument("--sample", type=int, default=32, help="take one of so many conversations")
    parser.add_argument("--divide", type=int, default=16, help="lengths by this")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds, for the whole hour")
    parser.add_argument("--ttft-ms", type=int, default=1000, help="an answer is good within this")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.read is not None:
        show(json.loads(options.read.read_bytes()))
        return
    sample = take_sample(options.trace, options.sample, options.divide)
    hour_s = (sample.requests[-1].timestamp - sample.requests[0].timestamp) / 1000
    speed = hour_s / options.duration
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    runs: list[Run] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        block_tokens = math.ceil(BLOCK_TOKENS / options.divide)
        arms = make_arms(options.engine, sample, block_tokens, memory)
        trace = folder / "sample.jsonl"
        trace.write_bytes(b"\n".join(map(msgspec.json.encode, sample.requests)) + b"\n")
        fleet = stack.enter_context(Fleet(folder, environment))
        model: dict[str, object] = {
            "worker.model": str(make_model(folder, MODEL)),
            "worker.served_model_name": SERVED,
        }
        workers = {arm: fleet.start_worker(arm, "both", arms[arm] | model) for arm in options.arms}
        for worker in workers.values():
            worker.wait_ready()
        gateways = {
            arm: fleet.start_gateway([], [], both=[worker], settings={})
            for arm, worker in workers.items()
        }
        for number in range(options.rounds):
            seed = os.urandom(4).hex()
            for arm in reversed(options.arms) if number % 2 else options.arms:
                pair = workers[arm], gateways[arm]
                runs.append(measure(arm, *pair, trace, speed, options, seed))
                print(runs[-1], file=sys.stderr)
                result = describe(sample, options) | {"runs": [asdict(run) for run in runs]}
                write_record(options.json, **result)  # an hour's work is kept if the next one ends
    show(result)


def describe(sample: Sample, options: argparse.Namespace) -> dict[str, object]:
    """What the figures are of."""
    return {
        "engine": options.engine,
        "sample": {
            "one_of": options.sample,
            "divided_by": options.divide,
            "duration_s": options.duration,
            "num_requests": len(sample.requests),
            "num_too_long": sample.num_too_long,
            "num_tokens": sample.num_tokens,
            "num_different_tokens": sample.num_different_tokens,
            "possible": sample.possible,
        },
        "pool_tokens": POOL_TOKENS,
        "capacity_over_different_tokens": SHARES,
        "good_ttft_ms": options.ttft_ms,
    }


def show(result: dict) -> None:
    """Medians over the rounds."""
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}))
    runs = [Run(**run) for run in result["runs"]]
    columns = (
        "saved",
        "good",
        "good a second",
        "TTFT p50, ms",
        "p99, ms",
        "TPOT, ms",
        "kept",
        "failed",
    )
    table = Table("store", *columns, box=box.MARKDOWN)
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        num_stored = sum(run.num_stored for run in own)
        num_left = num_stored + sum(run.num_dropped for run in own)
        table.add_row(
            arm,
            f"{statistics.median(run.saved for run in own):.1%}",
            f"{statistics.median(run.good for run in own):.1%}",
            f"{statistics.median(run.goodput_per_s for run in own):.2f}",
            f"{statistics.median(run.ttft_p50_ms for run in own):.0f}",
            f"{statistics.median(run.ttft_p99_ms for run in own):.0f}",
            f"{statistics.median(run.tpot_p50_ms for run in own):.1f}",
            f"{num_stored / num_left:.0%}" if num_left else "",
            str(sum(run.num_failed for run in own)),
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
