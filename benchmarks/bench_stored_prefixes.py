"""How soon does an answer begin whose prompt's beginning is in the store, and what do misses cost?

Embedded workers, each behind a gateway of its own: two without a store (`none`, and one that checks
the others' tokens), and for each tier one that computes prompts and leaves them there (the writer),
and one that is asked (the reader). Before each question that is timed all are idle for a second.

    cold    a prompt that no worker has seen: none, and each reader (which looks, and finds nothing)
    hit     the writer has answered the first 90 % of the prompt; then the reader is asked

Every prompt is new. Arms are interleaved, in the other order every second round; figures are
medians and quartiles over the rounds, of the time until an answer of one token is there, which is
checked. The token is compared by its bytes: one that is a part of a character has no text yet, and
engines differ in what they send for it. Whether something is looked for and loaded is the worker's
decision ("loaded", of tokens). "load / TTFT": what reading entries took of the time to the answer,
and "held / TTFT": what waiting for the answer of a lookup took of it, of embedded workers: the load
of the machine is in both.

`--parts` shows what costs what of new prompts: it asks for those alone, and each tier has two more
workers: `unkept`, which looks and keeps nothing, and `unused`, which has the store open and does
neither. `none again` is as `none`: what it differs is noise.

Tier `peer` is the memory of a `baton store serve` on this machine. Tier `host` is the reader's own:
there the reader is the writer, too, and is asked another long prompt in between, which takes the
blocks of the first one from its cache.

With `--engine vllm` the timed workers are vLLM servers; writers and checks are embedded workers.

    python benchmarks/bench_stored_prefixes.py --json benchmarks/results/stored-prefixes.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_prefixes import MODEL, SERVED
from completion_client import get
from random_model import make_model
from rich import box
from rich.console import Console
from rich.table import Table
from run_record import write_record

from baton.models import DEMO_MODEL_PATH
from baton.testing.fleet import Fleet, FleetProcess
from baton.tokenizer.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.free_ports import find_free_port
from tests.store_servers import S3_CREDENTIALS, RedisServer, S3Server, StoreServer

TIERS = ("host", "shared", "file", "redis", "object", "peer")
PEER_BYTES = 512 << 20
DEFAULT_TIERS = {"transformers": ["shared", "file"], "vllm": ["file"]}
"""By engine: a vLLM server takes a GiB, and half a minute to start."""
TOKENIZER = load_tokenizer(DEMO_MODEL_PATH)
"""Of the random model, too."""
SHARE = 0.9
IDLE_S = 1.0
HOST_BLOCKS = 300
"""Of a worker with tier `host`: one prompt of 4,000 tokens takes 250."""
PARTS: dict[str, dict[str, object]] = {
    "unkept": {"engine.max_kept_share": 0.0},
    "unused": {"store.prefixes": False},
}
ENGINES: dict[str, dict[str, object]] = {
    "transformers": {
        "engine.num_threads": 1,
        "engine.dtype": "float32",
        "engine.num_blocks": 2048,
    },
    "vllm": {
        "worker.engine": "vllm",
        "engine.num_threads": 1,
        "engine.dtype": "float32",
        "engine.kv_cache_bytes": 128 << 20,
        "engine.arguments": ["--enable-prompt-tokens-details"],
    },
}


@dataclass(frozen=True)
class Run:
    """One answer. `arm`: `none`, or the tier; `cached` is what of the prompt was not computed.

    `load_ms`: what the worker's loads took; 0 where it counted none. `held_ms`: how long it could
    have been computed, but waited for the store.
    """

    arm: str
    case: str
    num_tokens: int
    ttft_ms: float
    cached: int
    load_ms: float = 0.0
    held_ms: float = 0.0


def read_held_ms(gateway: FleetProcess, request_id: str) -> float:
    """How long a request was held by its worker."""
    trace = json.loads(get(gateway.url, f"/debug/requests/{request_id}"))
    return 1e3 * (trace.get("decode") or {}).get("held_s", 0.0)


def read_load_ms(worker: FleetProcess) -> float:
    """What a worker's loads have taken since its start."""
    begin = 'baton_prefix_load_seconds_total{kind="actual"'  # one sample for each tier
    lines = get(worker.url, "/metrics").splitlines()
    return 1e3 * sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin))


def spell(token: str) -> bytes:
    """A token of `logprobs`: vLLM names it by its id, the embedded engine by its text or bytes."""
    kind, _, value = token.partition(":")
    if kind == "token_id" and value.isdigit():
        return TOKENIZER.token_bytes(int(value))
    if kind == "bytes" and value.startswith("\\x"):
        return bytes.fromhex(value.replace("\\x", ""))
    return token.encode()


FIELDS_OF_ENGINE: dict[str, object] = {}
"""vLLM's servers alone name tokens by their ids."""


def ask(gateway: FleetProcess, prompt: list[int]) -> tuple[float, int, bytes, str]:
    """Milliseconds to an answer of one token, cached tokens, the token, and the request's id."""
    body = {"model": SERVED, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"logprobs": 0, **FIELDS_OF_ENGINE}
    headers = {"content-type": "application/json"}
    url = f"{gateway.url}/v1/completions"
    began = time.perf_counter()
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer, request_id = json.load(reply), reply.headers["x-request-id"]
    took_ms = (time.perf_counter() - began) * 1e3
    details = answer["usage"]["prompt_tokens_details"] or {}  # vLLM: null where nothing is cached
    (token,) = answer["choices"][0]["logprobs"]["tokens"]
    return took_ms, details.get("cached_tokens", 0), spell(token), request_id


def measure_round(
    fleet: dict[str, tuple[FleetProcess, FleetProcess]],
    num_tokens: int,
    rng: np.random.Generator,
    *,
    turned: bool,
) -> list[Run]:
    """Each case of each arm once; `fleet`: the worker and the gateway of each."""
    runs = []
    gateways = {arm: gateway for arm, (_, gateway) in fleet.items()}
    for arm in reversed(gateways) if turned else gateways:
        if arm == "checks" or arm.endswith("writer"):
            continue
        prompt = rng.integers(300, 4000, num_tokens).tolist()
        time.sleep(IDLE_S)
        took_ms, cached, token, request_id = ask(gateways[arm], prompt)
        held_ms = read_held_ms(gateways[arm], request_id)
        runs.append(Run(arm, "cold", num_tokens, took_ms, cached, held_ms=held_ms))
        right = ask(gateways["checks"], prompt)[2]
        check(cached == 0 and token == right, f"{arm}: {cached} cached, {token!r} for {right!r}")
        writer = gateways.get("host" if arm == "host" else f"{arm} writer")
        if writer is None:
            continue
        prompt = rng.integers(300, 4000, num_tokens).tolist()
        beginning = prompt[: int(SHARE * num_tokens)]
        ask(writer, beginning)
        if arm == "host":
            time.sleep(IDLE_S)
            ask(writer, rng.integers(300, 4000, 16 * HOST_BLOCKS - 200).tolist())
        before_ms = read_load_ms(fleet[arm][0])
        time.sleep(IDLE_S)  # it is kept in the background
        took_ms, cached, token, request_id = ask(gateways[arm], prompt)
        held_ms = read_held_ms(gateways[arm], request_id)
        load_ms = read_load_ms(fleet[arm][0]) - before_ms
        runs.append(Run(arm, "hit", num_tokens, took_ms, cached, load_ms, held_ms))
        right = ask(gateways["checks"], prompt)[2]
        check(token == right, f"{arm}: {cached} cached, {token!r} for {right!r}")
    return runs


def check(is_right: bool, what: str) -> None:  # noqa: FBT001 - an assertion that stays in
    """Raise AssertionError with `what`."""
    if not is_right:
        raise AssertionError(what)


def make_store(tier: str, folder: Path, stack: ExitStack) -> dict[str, object]:
    """Settings of a store of one tier; starts its server, which `stack` ends."""
    place = folder / tier
    place.mkdir()
    options: dict[str, object] = {"directory": "/dev/shm"}
    if tier == "host":
        options = {"capacity_bytes": PEER_BYTES}
    elif tier == "file":
        options = {"directory": str(place / "kv")}
    elif tier == "redis":
        options = {"url": stack.enter_context(closing(RedisServer(place))).url}
    elif tier == "object":
        options = stack.enter_context(closing(S3Server())).options
    elif tier == "peer":
        options = {"urls": [stack.enter_context(closing(start_daemon())).address]}
    settings = {f"store.options.{tier}.{name}": value for name, value in options.items()}
    own = {"engine.num_blocks": HOST_BLOCKS} if tier == "host" else {}
    return {"store.tiers": [tier], **own, **settings}


class Daemon(StoreServer):
    """`baton store serve` with memory that workers read and write as tier `peer`."""

    @property
    def address(self) -> str:
        """What workers name it."""
        return f"tcp://127.0.0.1:{self.port}"


def start_daemon() -> Daemon:
    """It has this process's environment, and with it the cluster key."""
    port = find_free_port()
    capacity = f"store.options.host.capacity_bytes={PEER_BYTES}"
    command = [
        sys.executable,
        "-m",
        "baton.cli",
        "store",
        "serve",
        "--store",
        "host",
        "--port",
        "0",
    ]
    return Daemon([*command, "--listen", f"127.0.0.1:{port}", "--set", capacity], port)


def start_fleet(
    fleet: Fleet, folder: Path, stores: dict[str, dict[str, object]], engine: str, *, parts: bool
) -> dict[str, tuple[FleetProcess, FleetProcess]]:
    """A worker and its gateway, by the arm's name. `engine` is that of workers which are timed."""
    settings: dict[str, object] = {
        "worker.model": str(make_model(folder, MODEL)),
        "worker.served_model_name": SERVED,
    }
    arms: dict[str, dict[str, object]] = {"none": {}, "checks": {}}
    if parts:
        arms["none again"] = {}
    for tier, store in stores.items():
        if parts:
            arms |= {tier: store, **{f"{tier} {part}": store | PARTS[part] for part in PARTS}}
            continue
        arms[tier] = store
        if tier != "host":
            arms[f"{tier} writer"] = store
    workers = {}
    for arm, store in arms.items():
        is_timed = arm != "checks" and not arm.endswith("writer")
        own = ENGINES[engine if is_timed else "transformers"]
        name = arm.replace(" ", "-")
        workers[arm] = fleet.start_worker(name, "both", own | settings | store)
    for worker in workers.values():
        worker.wait_ready()
    return {
        arm: (worker, fleet.start_gateway([], [], both=[worker], settings={}))
        for arm, worker in workers.items()
    }


def main() -> None:
    """Measure all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=tuple(ENGINES), default="transformers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 4000])
    parser.add_argument("--tiers", nargs="*", choices=TIERS)
    parser.add_argument("--parts", action="store_true", help="what costs what, of new prompts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="print the table of such a file again")
    options = parser.parse_args()
    if options.read is not None:
        show([Run(**run) for run in json.loads(options.read.read_bytes())["runs"]])
        return
    os.environ.update(S3_CREDENTIALS, BATON_CLUSTER_KEY=os.urandom(32).hex())
    if options.engine == "vllm":
        FIELDS_OF_ENGINE["return_tokens_as_token_ids"] = True
    rng = np.random.default_rng()
    runs: list[Run] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stores = {
            tier: make_store(tier, folder, stack)
            for tier in options.tiers or DEFAULT_TIERS[options.engine]
        }
        fleet = stack.enter_context(Fleet(folder, dict(os.environ)))
        arms = start_fleet(fleet, folder, stores, options.engine, parts=options.parts)
        for _, gateway in arms.values():
            ask(gateway, rng.integers(300, 4000, 600).tolist())  # engines learn what tokens take
        for number in range(options.rounds):
            for num_tokens in options.tokens:
                runs += measure_round(arms, num_tokens, rng, turned=bool(number % 2))
                print(runs[-1], file=sys.stderr)
    show(runs)
    write_record(options.json, engine=options.engine, share=SHARE, runs=runs)


def show(runs: list[Run]) -> None:
    """Medians and quartiles: of times, and of ratios to no store in the same round."""
    figures = ("TTFT, ms", "quartiles", "of none", "loaded")
    columns = ("tokens", "store", "case", *figures, "load / TTFT", "held / TTFT")
    table = Table(*columns, box=box.MARKDOWN)
    for num_tokens in sorted({run.num_tokens for run in runs}):
        found: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run.num_tokens == num_tokens:
                found.setdefault((run.arm, run.case), []).append(run)
        usual = [run.ttft_ms for run in found["none", "cold"]]
        for (arm, case), own in sorted(found.items()):
            times = [run.ttft_ms for run in own]
            loaded = statistics.fmean(run.cached for run in own) / num_tokens
            low, middle, high = statistics.quantiles(times, n=4)
            ratios = [time / none for time, none in zip(times, usual, strict=True)]
            ratio = "{1:.2f} ({0:.2f} to {2:.2f})".format(*statistics.quantiles(ratios, n=4))
            load = statistics.median(run.load_ms / run.ttft_ms for run in own)
            held = statistics.median(run.held_ms / run.ttft_ms for run in own)
            row = (
                f"{middle:.1f}",
                f"{low:.1f} to {high:.1f}",
                ratio,
                f"{loaded:.0%}",
                f"{load:.0%}",
                f"{held:.1%}",
            )
            table.add_row(str(num_tokens), arm, case, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
