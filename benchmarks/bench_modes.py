"""Push, pull, pool and by reference side by side: TTFT, and the memory that they hold on prefill.

    python benchmarks/bench_modes.py [--quick] [--engine vllm] [--store file] [--repetitions 5]
        [--json benchmarks/results/modes.json]
    python benchmarks/bench_modes.py --model large --dtype bfloat16 --arms colocated push
        --lengths 128 512 2048 4096 --repetitions 3 --json benchmarks/results/ttft.json

One prefill and one decode worker, a core each, behind a gateway for each arm; arms take turns.
Random prompts, so that no cache helps, and 16 tokens of answer, so that what is lent is held for a
while.

`colocated` is the prefill worker alone. `exposed` is how long after prefill's end the last layer
arrived, from the trace: below zero, all of the transfer was hidden behind prefill. `second token`
is the gap between the first two tokens: what an early first token leaves to wait for. Memory is
read from the prefill worker's
`baton_handoff_held_block_seconds_total`, times the bytes of a block: while the prompt is computed,
and from then on until the handoff ends. Each request's own mode is checked in its trace and in
that counter. A request that was handed over otherwise ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from bench_recovery import is_free, wait_until
from bench_verification import read_info
from completion_client import find_metric, get, read_trace, stream
from random_model import make_model
from rich.console import Console
from rich.table import Table

from baton.bench.files import close_manifest, open_manifest
from baton.clock import MachineClock
from baton.kv.layout import KVLayout
from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.testing.fleet import FleetProcess

LENGTHS = (512, 1024, 2048, 4096, 8192)
MODELS: Final = {
    "small": {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 8, "context": 8448},
    "large": {"layers": 16, "hidden": 1024, "heads": 16, "kv-heads": 8},
}
"""Random Llamas: 8 KiB of KV per token in float32 for little computing; 194 M parameters."""
NUM_OUTPUT_TOKENS = 16
KV_BYTES = 512 << 20
STORE_BYTES = 1 << 30
EARLY: Final = "push, early"
CONFIGURATIONS: Final = ("colocated", "push", EARLY, "pull", "pool", "reference")
ENGINE_CONFIGURATIONS: Final = {
    "transformers": CONFIGURATIONS,
    "vllm": ("colocated", "push", "pull", "pool"),
}
"""vLLM's blocks cannot be attended over from outside, and its first token cannot be agreed on."""
HELD: Final = "baton_handoff_held_block_seconds_total"
UNTRACED: Final = {
    "mode": "colocated",
    "num_received_tokens": 0,
    "num_bytes": 0,
    "transport": None,
    "fallbacks": [],
}
"""What a request that is vLLM's own leaves."""
console = Console(stderr=True, width=160)


@dataclass(frozen=True)
class Sample:
    """One request. Seconds; bytes times seconds for memory, which colocated requests do not hold.

    `was_early`: the first token was the prefill worker's own.
    """

    configuration: str
    num_tokens: int
    ttft_s: float
    second_token_s: float
    computing_byte_s: float
    waiting_byte_s: float
    num_bytes: int
    transport: str | None
    was_early: bool
    exposed_transfer_s: float | None = None


def main() -> None:
    """Run the benchmark, print a table, keep the samples."""
    options = parse()
    manifest = open_manifest(sys.argv, MachineClock())
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(Path(folder), options)
    console.print(render(samples))
    if options.json:
        record = {
            "manifest": msgspec.to_builtins(close_manifest(manifest)),
            "engine": options.engine,
            "model": MODELS[options.model] | {"dtype": options.dtype},
            "store": options.store,
            "summary": summarize(samples),
            "samples": [asdict(sample) for sample in samples],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line; `--quick` only proves that everything runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--arms", nargs="+", choices=CONFIGURATIONS)
    parser.add_argument("--engine", choices=sorted(ENGINE_CONFIGURATIONS), default="transformers")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--transport", choices=["shared", "tcp"], default="shared")
    parser.add_argument("--store", choices=["shared", "file"], default="shared")
    parser.add_argument("--quick", action="store_true", help="512 and 1,024 tokens, once")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.lengths = 1, (512, 1024)
    options.arms = options.arms or ENGINE_CONFIGURATIONS[options.engine]
    return options


def worker_settings(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """The same for both workers."""
    store = f"store.options.{options.store}"
    settings: dict[str, object] = {
        "worker.model": str(make_model(folder, MODELS[options.model], options.dtype)),
        "worker.served_model_name": "model",
        "worker.engine": options.engine,
        "engine.num_threads": 1,
        "engine.dtype": options.dtype,
        "engine.kv_cache_bytes": KV_BYTES,
        "transfer.transports": [options.transport],
        "store.tiers": [options.store],
        f"{store}.capacity_bytes": STORE_BYTES,
    }
    if options.store == "file":
        settings[f"{store}.directory"] = str(folder / "store")
    if options.engine == "vllm":
        settings["engine.max_context_tokens"] = MODELS["small"]["context"]
    return settings


def measure(folder: Path, options: argparse.Namespace) -> list[Sample]:
    """Start the workers and the gateways, and ask them in turn."""
    settings = worker_settings(folder, options)
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    with Fleet(folder, environment) as fleet:
        cores = sorted(os.sched_getaffinity(0))
        prefill = fleet.start_worker("prefill-0", "both", settings, cores=cores[:1])
        decode = fleet.start_worker("decode-0", "both", settings, cores=cores[-1:])
        for worker in (prefill, decode):
            worker.wait_ready()
            if len(os.sched_getaffinity(worker.pid)) != 1:
                raise RuntimeError(f"{worker.name} is not pinned to one core")
        cluster = WorkerCluster(options.engine, prefill, read_info(prefill))
        configurations = {
            configuration: start_gateway(fleet, configuration, prefill, decode)
            for configuration in options.arms
        }
        for configuration, gateway in configurations.items():
            cluster.ask(configuration, gateway, rng.integers(300, 4000, 300).tolist())  # warm-up
        for repetition in range(options.repetitions):
            for num_tokens in options.lengths:
                for configuration in turned(options.arms, repetition):
                    prompt = rng.integers(300, 4000, num_tokens).tolist()
                    sample = cluster.ask(configuration, configurations[configuration], prompt)
                    samples.append(sample)
                    console.print(
                        f"{configuration:12} {num_tokens:5} tokens {sample.ttft_s:7.3f} s, held "
                        f"{sample.computing_byte_s / 2**20:8.2f} + "
                        f"{sample.waiting_byte_s / 2**20:8.2f} MiB s"
                    )
    return samples


def turned(configurations: Sequence[str], repetition: int) -> list[str]:
    """Another one is first in each repetition, and every second one goes backwards."""
    at = repetition % len(configurations)
    order = [*configurations[at:], *configurations[:at]]
    return order if repetition % 2 else order[::-1]


def start_gateway(
    fleet: Fleet, configuration: str, prefill: FleetProcess, decode: FleetProcess
) -> FleetProcess:
    """A gateway that hands over in one way only."""
    if configuration == "colocated":
        return fleet.start_gateway([], [], both=[prefill], settings={"gateway.mode": configuration})
    mode = "push" if configuration == EARLY else configuration
    settings = {"gateway.mode": mode, "gateway.first_token_early": configuration == EARLY}
    return fleet.start_gateway([prefill], [decode], settings=settings)


@dataclass
class WorkerCluster:
    """The prefill worker, where it counts, and what it says about itself."""

    engine: str
    prefill: FleetProcess
    info: dict

    def ask(self, configuration: str, gateway: FleetProcess, prompt: list[int]) -> Sample:
        """One request; returns when the prefill worker holds nothing of it any more.

        Raises:
            RuntimeError: it was not answered, or not in the way that the arm is about.
        """
        before, early_before = self._count(), count_early(gateway)
        # With logprobs every token is an event, whether it makes a character or not.
        body = {"model": "model", "prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS}
        reply = stream(gateway.url, body | {"temperature": 0, "ignore_eos": True, "logprobs": 0})
        self._wait_released(before)
        held = self._held(before)
        trace = read_trace(gateway.url, reply.request_id) or UNTRACED
        mode = None if configuration == "colocated" else configuration.partition(",")[0]
        check(trace, held, mode, len(prompt))
        block_bytes = msgspec.convert(self.info["layout"], KVLayout).block_bytes
        return Sample(
            configuration=configuration,
            num_tokens=len(prompt),
            ttft_s=reply.ttft_s,
            second_token_s=reply.arrivals_s[1] - reply.arrivals_s[0],
            computing_byte_s=held.get((mode, "computing"), 0.0) * block_bytes,
            waiting_byte_s=held.get((mode, "waiting"), 0.0) * block_bytes,
            num_bytes=trace["num_bytes"],
            transport=trace["transport"],
            was_early=count_early(gateway) > early_before,
            exposed_transfer_s=trace.get("exposed_transfer_s"),
        )

    def _count(self) -> str:
        """The prefill worker's metrics; those of vLLM's connector have a port of their own."""
        if self.engine != "vllm":
            return get(self.prefill.url, "/metrics")
        return get(self.info["control_urls"][0], "/metrics")

    def _wait_released(self, before: str) -> None:
        """Until its blocks are free. vLLM's count is not ours to read: until the handoff is over.

        A colocated request of vLLM's leaves no trace there.
        """
        if self.engine != "vllm":
            wait_until(lambda: is_free(self.prefill))
            return
        deadline = time.monotonic() + 1.0
        while count_sent(self._count()) == count_sent(before) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _held(self, before: str) -> dict[tuple[str | None, str], float]:
        """Block-seconds since then, by mode and phase, but those that are 0."""
        after = self._count()
        modes, phases = ("push", "pull", "pool", "reference"), ("computing", "waiting")
        names = {(m, p): f'{HELD}{{mode="{m}",phase="{p}"}}' for m in modes for p in phases}
        grown = {
            key: find_metric(after, name) - find_metric(before, name) for key, name in names.items()
        }
        return {key: block_s for key, block_s in grown.items() if block_s}


def check(
    trace: dict, held: dict[tuple[str | None, str], float], mode: str | None, num_tokens: int
) -> None:
    """Whether a request was handed over in this mode, all of it, and nothing else was held."""
    lacks = mode is not None and trace["num_received_tokens"] != num_tokens
    other_hold = {found for found, _ in held} != ({mode} if mode else set())
    other_way = mode == "reference" and trace["transport"] != "reference"
    other_mode = trace["mode"] != (mode or "colocated")
    if lacks or other_hold or other_way or other_mode or trace["fallbacks"]:
        raise RuntimeError(f"wanted {mode}: held {held}, {trace}")


def count_early(gateway: FleetProcess) -> float:
    """Streams that began with the prefill worker's token."""
    return find_metric(get(gateway.url, "/metrics"), "baton_gateway_early_first_tokens_total")


def count_sent(text: str) -> float:
    """Handoffs that have ended on the prefill side."""
    lines = (line for line in text.splitlines() if line.startswith("baton_handoffs_total"))
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'role="prefill"' in line)


def summarize(samples: list[Sample]) -> list[dict[str, object]]:
    """For each length and arm: medians, and the range of TTFT and of memory."""
    rows: list[dict[str, object]] = []
    for num_tokens in sorted({sample.num_tokens for sample in samples}):
        here = [sample for sample in samples if sample.num_tokens == num_tokens]
        alone = [sample.ttft_s for sample in here if sample.configuration == "colocated"]
        for configuration in CONFIGURATIONS:
            found = [sample for sample in here if sample.configuration == configuration]
            if not found:
                continue
            ttfts = sorted(sample.ttft_s for sample in found)
            waits = sorted(sample.waiting_byte_s for sample in found)
            exposed = [s.exposed_transfer_s for s in found if s.exposed_transfer_s is not None]
            rows.append({
                "num_tokens": num_tokens,
                "configuration": configuration,
                "ttft_s": statistics.median(ttfts),
                "ttft_min_s": ttfts[0],
                "ttft_max_s": ttfts[-1],
                **compare_ttft([sample.ttft_s for sample in found], alone),
                "exposed_transfer_s": statistics.median(exposed) if exposed else None,
                "second_token_s": statistics.median(s.second_token_s for s in found),
                "computing_byte_s": statistics.median(s.computing_byte_s for s in found),
                "waiting_byte_s": statistics.median(waits),
                "waiting_min_byte_s": waits[0],
                "waiting_max_byte_s": waits[-1],
                "num_bytes": max(sample.num_bytes for sample in found),
                "num_early": sum(sample.was_early for sample in found),
                "num_samples": len(found),
            })
    return rows


def compare_ttft(found_s: list[float], alone_s: list[float]) -> dict[str, float | None]:
    """TTFT over the colocated one's: of the medians, and the range of each repetition's."""
    if not alone_s:
        return {"over_colocated": None}
    ratios = [found / alone for found, alone in zip(found_s, alone_s, strict=True)]
    return {
        "over_colocated": statistics.median(found_s) / statistics.median(alone_s),
        "over_colocated_min": min(ratios),
        "over_colocated_max": max(ratios),
    }


def render(samples: list[Sample]) -> Table:
    """The summary for people."""
    table = Table(title="One request at a time, a core for each worker")
    for name in (
        "tokens", "how", "TTFT s (range)", "over colocated", "exposed ms", "second token ms",
        "held while computed MiB s", "and until released (range)", "MiB moved",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in summarize(samples):
        is_alone, ratio = row["configuration"] == "colocated", row["over_colocated"]
        exposed_s = row["exposed_transfer_s"]
        waits = [row[f"waiting{which}_byte_s"] / 2**20 for which in ("", "_min", "_max")]
        table.add_row(
            f"{row['num_tokens']}",
            f"{row['configuration']}",
            f"{row['ttft_s']:.3f} ({row['ttft_min_s']:.3f} to {row['ttft_max_s']:.3f})",
            ""
            if ratio is None
            else f"{ratio:.3f} ({row['over_colocated_min']:.3f} to "
            f"{row['over_colocated_max']:.3f})",
            "" if exposed_s is None else f"{1e3 * exposed_s:.1f}",
            f"{1e3 * row['second_token_s']:.1f}",
            "" if is_alone else f"{row['computing_byte_s'] / 2**20:.2f}",
            "" if is_alone else f"{waits[0]:.3f} ({waits[1]:.3f} to {waits[2]:.3f})",
            f"{row['num_bytes'] / 2**20:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
