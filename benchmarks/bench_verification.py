"""What verification costs: digests and tickets, as a share of TTFT and of a handoff's own time.

    python benchmarks/bench_verification.py [--part ttft handoff copy send] [--engine transformers]
        [--repetitions 5] [--json benchmarks/results/verification.json]

`ttft`: a pair of workers, one core each, behind a gateway; the CPU time of every digest that a
prompt of 2,048 tokens takes on both sides, and of its ticket (sealed once, checked twice), over the
TTFT that the pair really has. That is an upper bound of what TTFT has lost: digests are made on the
agent's thread, beside the model. With `--engine vllm` the pair is vLLM (needs `make install
ENGINE=vllm`).

`handoff`: workload S (8,192 pages of 32 KiB) as one handoff between two processes, with every level
of verification, taking turns, over each transport: the share is 1 - identity / full. `keyed` is
`full` with the digests that KV between hosts has.

`copy`: the receiver's copies and digests of a read over `shared`, in one pass over cache-sized
parts, as Baton does it, and in two; beside them memcpy of the same pages, in the same rounds.

`send`: the same of the sender's digests and copies of writes over `shared`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from completion_client import ServerError, get, post, read_trace, stream
from copy_and_verify import measure_copies
from digest_and_send import PROMPTS, measure_sends
from random_model import make_model
from rich.console import Console
from run_record import write_record
from verified_handoffs import KEYED, NUM_BYTES, measure

from baton.auth.credentials import Credentials
from baton.auth.ticket import Ticket, TicketIssuer, WorkerRef, seal, unseal
from baton.clock import MachineClock
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.kv.copies import BlockTable, PagedSequence, compute_pieces
from baton.kv.digest import compute_digests, locate_pieces
from baton.kv.geometry import page_geometry
from baton.kv.layout import KVLayout
from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from baton.testing.fleet import FleetProcess

NUM_TOKENS = 2048
MODEL = {"layers": 16, "hidden": 1024, "heads": 16, "kv-heads": 8}
LEVELS = ("full", "sampled", "identity")
console = Console(stderr=True)


def main() -> None:
    """Run the parts, print what they found, keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=["ttft", "handoff", "copy", "send"])
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--transports", nargs="+", default=["shared", "tcp"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="bfloat16 where cores have units for it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, object] = {}
    if "ttft" in options.part:
        record["ttft"] = measure_ttft(options)
    if "handoff" in options.part:
        record["handoff"] = {
            kind: measure_handoffs(kind, options.repetitions) for kind in options.transports
        }
    if "copy" in options.part:
        record["copy"] = report_copies(measure_copies(options.repetitions), NUM_BYTES)
    if "send" in options.part:
        sends: dict[str, object] = {}
        for prompt in PROMPTS:
            console.print(prompt.name)
            found = measure_sends(prompt, options.repetitions)
            sends[prompt.name] = report_copies(found, prompt.num_bytes)
        record["send"] = sends
    write_record(options.json, **record)


def measure_ttft(options: argparse.Namespace) -> dict[str, float]:
    """Digests and tickets of one prompt over its TTFT."""
    with tempfile.TemporaryDirectory() as folder:
        ttfts, layouts = ask_a_pair(Path(folder), options)
    ttft_s = statistics.median(ttfts)
    digests_s = sum(time_digests(own, peer) for own, peer in (layouts, layouts[::-1]))
    tickets_s = time_tickets()
    found = {
        "num_tokens": NUM_TOKENS,
        "ttft_s": ttft_s,
        "ttft_min_s": min(ttfts),
        "digests_s": digests_s,
        "tickets_s": tickets_s,
        "share": (digests_s + tickets_s) / ttft_s,
    }
    console.print(
        f"{options.engine}: digests {digests_s * 1e3:.2f} ms, tickets {tickets_s * 1e3:.3f} ms of "
        f"{ttft_s:.3f} s to the first token at {NUM_TOKENS} tokens: {found['share']:.3%}"
    )
    return found


def report_copies(found: dict[str, list[float]], num_bytes: int) -> dict[str, dict[str, float]]:
    """Rates by CPU time, and their ratios to memcpy in each round."""
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in found.items():
        shares = sorted(m / s for m, s in zip(found["memcpy"], seconds, strict=True))
        rows[name] = {
            "gb_per_s": num_bytes / statistics.median(seconds) / 1e9,
            "best_gb_per_s": num_bytes / min(seconds) / 1e9,
            "of_memcpy": statistics.median(shares),
            "of_memcpy_min": shares[0],
            "of_memcpy_max": shares[-1],
        }
        console.print(
            f"{name:12} {rows[name]['gb_per_s']:.2f} GB/s (best {rows[name]['best_gb_per_s']:.2f}),"
            f" {rows[name]['of_memcpy']:.2f} of memcpy ({shares[0]:.2f} to {shares[-1]:.2f})"
        )
    return rows


def ask_a_pair(
    folder: Path, options: argparse.Namespace
) -> tuple[list[float], tuple[KVLayout, KVLayout]]:
    """TTFT of fresh prompts through a gateway, and the layouts of the two workers."""
    model = make_model(folder, MODEL, options.dtype)
    settings: dict[str, object] = {
        "worker.model": str(model),
        "worker.served_model_name": "model",
        "worker.engine": options.engine,
        "engine.dtype": options.dtype,
        "engine.num_threads": 1,
        "engine.kv_cache_bytes": 1 << 29,
        "transfer.transports": [options.transports[0]],
    }
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    rng = np.random.default_rng(0)
    with Fleet(folder, environment) as fleet:
        cores = sorted(os.sched_getaffinity(0))
        prefill = fleet.start_worker("prefill-0", "prefill", settings, cores=cores[:1])
        decode = fleet.start_worker("decode-0", "decode", settings, cores=cores[-1:])
        gateway = fleet.start_gateway([prefill.wait_ready()], [decode.wait_ready()])
        ask(gateway, rng.integers(300, 4000, 64).tolist())
        ttfts = [
            ask(gateway, rng.integers(300, 4000, NUM_TOKENS).tolist())
            for _ in range(options.repetitions)
        ]
        return ttfts, (read_layout(prefill), read_layout(decode))


def read_layout(worker: FleetProcess) -> KVLayout:
    """How a worker's KV lies."""
    return msgspec.convert(read_info(worker)["layout"], KVLayout)


def read_info(worker: FleetProcess) -> dict:
    """What a worker, or the connector in a vLLM server, says about itself."""
    try:
        return json.loads(get(worker.url, "/baton/v1/info"))
    except ServerError:  # a vLLM server has no such path
        body = {"model": "model", "prompt": [0], "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = {"baton_info": True}
        return post(worker.url, "/v1/completions", body)["kv_transfer_params"]["baton_info"]


def ask(gateway: FleetProcess, prompt: list[int]) -> float:
    """Seconds to the first byte of the first event; it must have been a handoff."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    reply = stream(gateway.url, body | {"ignore_eos": True})
    summary = read_trace(gateway.url, reply.request_id)
    if summary["num_received_tokens"] != len(prompt):
        raise RuntimeError(f"not a handoff: {summary}")
    return reply.ttft_s


def time_digests(own: KVLayout, peer: KVLayout) -> float:
    """CPU seconds of all digests that one side makes of one prompt, layer by layer."""
    num_blocks = -(-NUM_TOKENS // own.block_size)
    rng = np.random.default_rng(1)
    sequence = PagedSequence(own, BlockTable(0, rng.permutation(num_blocks).astype(np.int64)))
    bounds = compute_pieces(own.block_size, peer.block_size, 0, NUM_TOKENS)
    layers = [
        rng.integers(0, 256, (num_blocks, own.page_bytes(n)), np.uint8)
        for n in range(own.num_layers)
    ]
    begun = time.process_time()
    for number, pages in enumerate(layers):
        geometry = page_geometry(sequence.layout, number)
        compute_digests(geometry, [pages], locate_pieces(sequence, bounds))
    return time.process_time() - begun


def time_tickets(num_rounds: int = 2000) -> float:
    """CPU seconds of one ticket: sealed by the gateway, unsealed by both workers, and resealed."""
    key, issuer = Credentials.generate(), TicketIssuer(MachineClock())
    prefill = WorkerRef(WorkerId("prefill"), new_epoch(), "10.0.0.1:7000")
    decode = WorkerRef(WorkerId("decode"), new_epoch(), "10.0.0.1:7000")
    ticket = Ticket(new_ticket_id(), "request", prefill, decode, "push", issuer.issue(60))
    begun = time.process_time()
    for _ in range(num_rounds):
        sealed = seal(ticket, key)
        for _ in range(3):  # prefill's leg, decode's leg, and the grant on prefill
            unseal(sealed, key)
        seal(ticket, key)  # the grant carries it
    return (time.process_time() - begun) / num_rounds


def measure_handoffs(kind: str, num_rounds: int) -> dict[str, dict[str, float]]:
    """Workload S over one transport, by level."""
    rounds = measure(kind, LEVELS if kind == "shared" else (KEYED, *LEVELS), num_rounds)
    shares = sorted(
        1 - bare.seconds / full.seconds
        for full, bare in zip(rounds["full"], rounds["identity"], strict=True)
    )
    rows: dict[str, dict[str, float]] = {}
    for level, received in rounds.items():
        seconds = statistics.median(one.seconds for one in received)
        rows[level] = {
            "seconds": seconds,
            "gb_per_s": NUM_BYTES / seconds / 1e9,
            "cpu_s": statistics.median(one.cpu_s for one in received),
            "verified": statistics.median(one.verified_bytes for one in received) / NUM_BYTES,
        }
        console.print(
            f"{kind:8} {level:8} {seconds * 1e3:8.1f} ms, {rows[level]['gb_per_s']:.2f} GB/s, "
            f"CPU {rows[level]['cpu_s'] * 1e3:.0f} ms, {rows[level]['verified']:.1%} compared"
        )
    rows["share"] = {
        "median": statistics.median(shares),
        "min": shares[0],
        "max": shares[-1],
    }
    console.print(f"{kind:8} verification is {rows['share']['median']:.0%} of the handoff")
    return rows


if __name__ == "__main__":
    main()
