"""What each encoding of KV costs and gives: bytes, time, error, and answers over a slow link.

    codecs   bytes, and GB for each CPU second of the thread beside memcpy, of KV of the demo model (head dimension 32)
             tiled to 8 MiB, and of random numbers in the layout of Llama-3.1-8B (8 layers, head
             dimension 128). GB are those of the KV as it was computed.
    quality  the demo model on chapters it was not trained on (`--text`, the files that
             `scripts/extract_austen.py` writes): KV of 1,024 tokens is encoded and decoded in
             blocks of 64, then the next 256 tokens are scored. Beside the KV as it was computed:
             log-probabilities (largest and mean difference), KL divergence, perplexity, how often
             the likeliest token is the same, and for how many of 64 greedy tokens. The error of
             the KV itself is that of `baton.encodings.error_budget`.
    link     time to the first token over two hosts (network namespaces) and a link of each of
             `--mbit` (0: not limited), for each of `--dtypes`; every arm has workers and a gateway
             of its own, all at once. The arm int8 has `handoff.encoding = "int8"`: whether KV is
             encoded follows from the link as the workers have measured it. "predicted" is what
             they expected of raw KV and of encoded KV.
             `cached`: the prefill worker has the prompt's KV, so that the handoff is what takes
             time; `cold`: it computes it, on one thread. Where the rest of the time is, by the
             decode worker's record: until the pages are granted, until all KV is there, until the
             token, and outside of that worker. Needs root and iproute2. With `--engine vllm` all
             workers are vLLM servers, of which each takes a GiB.

`--arms`: other encodings, or error budgets (0.25), in place of int8; raw is the first.

Trials are interleaved; medians and quartiles. `--table FILE` prints the links of a result as in
docs/benchmarks.md.

    python benchmarks/bench_encodings.py --text /tmp/austen/*.txt --json benchmarks/results/encodings.json
"""  # noqa: E501 - a command to copy

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from random_model import make_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from demo_corpus import read_corpus

from baton.encodings.error_budget import measure_error
from baton.encodings.interface import ENCODINGS, KVEncoding
from baton.kv.layout import KVLayout
from baton.models import DEMO_MODEL_PATH
from baton.testing.fleet import Fleet, start_command
from baton.testing.network_namespaces import NoNamespaceError, bridged_hosts, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.testing.fleet import FleetProcess
    from baton.testing.network_namespaces import BridgedHost

KINDS = ("raw", "zstd", "int8", "fp8", "int4", "int4_token")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
BLOCK = 64
CONTEXT, SCORED, GREEDY = 1024, 256, 64
BATCH_BYTES = 8 << 20
LINK_MODEL = {"layers": 4, "hidden": 512, "heads": 4, "intermediate": 256}
"""Heads of 128: 16 KiB of KV for each token in float32."""
STAGES = ("until granted", "until landed", "until token", "outside decode")
DOC_COLUMNS = (
    "KV",
    "tokens",
    "link",
    "case",
    "encoded",
    "predicted raw and encoded, ms",
    "raw workers, TTFT, ms (quartiles)",
    "int8 workers, TTFT, ms (quartiles)",
    "int8 / raw",
)
STAGE_COLUMNS = ("KV", "link", "case", "workers", *(f"{each}, ms" for each in STAGES))
LINK_ENGINES: dict[str, dict[str, object]] = {
    "transformers": {"engine.num_blocks": 512},
    "vllm": {"worker.engine": "vllm", "engine.kv_cache_bytes": 256 << 20},
}
Cache = list[tuple[torch.Tensor, torch.Tensor]]


# ---------------------------------------------------------------------------- quality


def load_model() -> AutoModelForCausalLM:
    """The demo model, in float32."""
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32).eval()


def read_windows(text: Sequence[Path], num_windows: int) -> list[torch.Tensor]:
    """Held-out token ids, `[CONTEXT + SCORED]` each, spread over all of them."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    corpus = read_corpus([path.read_text() for path in sorted(text)])
    ids = [tokenizer.encode("\n\n".join(chapter), verbose=False) for chapter in corpus.held_out]
    tokens = torch.tensor([token for chapter in ids for token in chapter])
    size = CONTEXT + SCORED
    starts = np.linspace(0, len(tokens) - size, num_windows).astype(int)
    windows = [tokens[start : start + size].clone() for start in starts]
    for window in windows:
        window[0] = tokenizer.bos_token_id
    return windows


def compute_kv(model: AutoModelForCausalLM, tokens: torch.Tensor) -> Cache:
    """Keys and values of each layer, `[1, heads, tokens, dim]`."""
    cache = model(tokens[None], use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def to_blocks(kv: Cache) -> tuple[KVLayout, np.ndarray]:
    """The KV in canonical order, blocks of `BLOCK` tokens."""
    planes = torch.stack([torch.stack([k[0], v[0]]) for k, v in kv]).numpy()
    layers, _, heads, tokens, dim = planes.shape
    cut = planes.reshape(layers, 2, heads, tokens // BLOCK, BLOCK, dim)
    blocks = np.ascontiguousarray(cut.transpose(3, 0, 1, 4, 2, 5)).reshape(tokens // BLOCK, -1)
    layout = KVLayout.gqa(layers, heads, dim, block_size=BLOCK, dtype="float32")
    return layout, blocks.view(np.uint8)


def from_blocks(layout: KVLayout, blocks: np.ndarray) -> Cache:
    """The inverse."""
    heads, dim = layout.layers[0].planes[0].num_heads, layout.layers[0].planes[0].head_dim
    cut = blocks.view(np.float32).reshape(-1, layout.num_layers, 2, BLOCK, heads, dim)
    planes = torch.tensor(np.ascontiguousarray(cut.transpose(1, 2, 4, 0, 3, 5)))
    planes = planes.reshape(layout.num_layers, 2, heads, -1, dim)
    return [(each[0][None], each[1][None]) for each in planes]


def round_trip(encoding: KVEncoding, kv: Cache) -> Cache:
    """What a worker has that got this KV encoded."""
    layout, blocks = to_blocks(kv)
    decoded = np.empty_like(blocks)
    encoding.decode(layout, encoding.encode(layout, blocks), decoded)
    return from_blocks(layout, decoded)


def compute_error(kv: Cache, changed: Cache) -> float:
    """Of keys or values, whichever is larger, as an error budget has it of reference KV."""
    layout, exact = to_blocks(kv)
    return measure_error(layout, exact, to_blocks(changed)[1])


def score(model: AutoModelForCausalLM, kv: Cache, rest: torch.Tensor) -> torch.Tensor:
    """Log-probabilities after each of `rest` but the last, `[tokens, vocabulary]`."""
    logits = model(rest[None], past_key_values=make_cache(kv), use_cache=True).logits
    return logits[0, :-1].log_softmax(-1)


def generate(model: AutoModelForCausalLM, kv: Cache, first: torch.Tensor) -> list[int]:
    """Greedy tokens after the context and one token more."""
    cache, token, found = make_cache(kv), first, []
    for _ in range(GREEDY):
        logits = model(token.view(1, 1), past_key_values=cache, use_cache=True).logits
        token = logits[0, -1].argmax()
        found.append(int(token))
    return found


def make_cache(kv: Cache) -> DynamicCache:
    """A cache of the model's own."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys.clone(), values.clone(), layer)
    return cache


@torch.no_grad()
def measure_quality(options: argparse.Namespace) -> list[dict[str, float | str]]:
    """One row for each encoding, over all windows."""
    model, rows = load_model(), {kind: [] for kind in KINDS}
    for window in read_windows(options.text, options.windows):
        kv, rest = compute_kv(model, window[:CONTEXT]), window[CONTEXT:]
        exact, greedy = score(model, kv, rest), generate(model, kv, rest[0])
        for kind in KINDS:
            changed = round_trip(ENCODINGS.build(kind, {}), kv)
            scored, tokens = score(model, changed, rest), generate(model, changed, rest[0])
            difference = (scored - exact).abs()
            divergence = (exact.exp() * (exact - scored)).sum(-1)
            equal = [one == other for one, other in zip(greedy, tokens, strict=True)]
            rows[kind].append({
                "error": compute_error(kv, changed),
                "loss": float(-scored.gather(1, rest[1:, None]).mean()),
                "max_logprob_error": float(difference.max()),
                "mean_logprob_error": float(difference.mean()),
                "mean_kl": float(divergence.mean()),
                "max_kl": float(divergence.max()),
                "same_likeliest": float((scored.argmax(-1) == exact.argmax(-1)).float().mean()),
                "same_greedy": float(equal.index(False) if False in equal else GREEDY),
            })
    return [{"encoding": kind, **summarize(each)} for kind, each in rows.items()]


def summarize(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means over windows, largest of what is a largest, and the perplexity."""
    means = {
        name: (max if name.startswith("max") else statistics.fmean)([row[name] for row in rows])
        for name in rows[0]
    }
    return means | {"perplexity": float(np.exp(means["loss"]))}


# ---------------------------------------------------------------------------- codecs


@dataclass(frozen=True)
class Codec:
    """One encoding of one kind of KV: GB of raw KV for each CPU second, quartiles."""

    data: str
    dtype: str
    encoding: str
    share: float
    encode: tuple[float, float, float]
    decode: tuple[float, float, float]


def measure_codecs(options: argparse.Namespace) -> list[Codec]:
    """Encode, decode and memcpy in turns."""
    rng = np.random.default_rng(0)
    found = []
    for dtype, numpy_dtype in DTYPES.items():
        data = {"llama-3.1-8b": make_random(dtype, rng)}
        if options.text:
            data["demo"] = make_trained(dtype, options.text)
        for name, (layout, numbers) in data.items():
            blocks = numbers.astype(numpy_dtype).view(np.uint8)
            found += time_codecs(name, layout, blocks, options.rounds)
    return found


def make_random(dtype: str, rng: np.random.Generator) -> tuple[KVLayout, np.ndarray]:
    """Normal numbers, in pages of 8 KV heads of 128."""
    layout = KVLayout.gqa(8, 8, 128, block_size=BLOCK, dtype=dtype)
    shape = (BATCH_BYTES // layout.block_bytes, layout.block_bytes // layout.element_bytes)
    return layout, rng.standard_normal(shape).astype(np.float32)


@torch.no_grad()
def make_trained(dtype: str, text: Sequence[Path]) -> tuple[KVLayout, np.ndarray]:
    """KV of held-out text, the same blocks again and again."""
    [window] = read_windows(text, 1)
    layout, blocks = to_blocks(compute_kv(load_model(), window[:CONTEXT]))
    numbers = blocks.view(np.float32)
    layers, plane = layout.num_layers, layout.layers[0].planes[0]
    layout = KVLayout.gqa(layers, plane.num_heads, plane.head_dim, block_size=BLOCK, dtype=dtype)
    return layout, np.resize(numbers, (BATCH_BYTES // layout.block_bytes, numbers.shape[1]))


def time_codecs(name: str, layout: KVLayout, blocks: np.ndarray, rounds: int) -> list[Codec]:
    """All encodings of the same blocks; `memcpy` in place of `raw`."""
    target = np.empty_like(blocks)
    encodings = {kind: ENCODINGS.build(kind, {}) for kind in KINDS if kind != "raw"}
    encoded = {kind: each.encode(layout, blocks) for kind, each in encodings.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("memcpy", op): partial(np.copyto, target, blocks) for op in ("encode", "decode")
        }
        for kind, each in encodings.items():
            calls[kind, "encode"] = partial(each.encode, layout, blocks)
            calls[kind, "decode"] = partial(each.decode, layout, encoded[kind], target)
        for key, call in calls.items():
            began = time.thread_time()
            call()
            if number:  # the first one warms up
                times.setdefault(key, []).append(time.thread_time() - began)
    shares = {kind: sum(map(len, each)) / blocks.nbytes for kind, each in encoded.items()}
    return [
        Codec(
            name,
            layout.dtype,
            kind,
            shares.get(kind, 1.0),
            quartiles([blocks.nbytes / 1e9 / each for each in times[kind, "encode"]]),
            quartiles([blocks.nbytes / 1e9 / each for each in times[kind, "decode"]]),
        )
        for kind in ("memcpy", *encodings)
    ]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First, median, third."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


# ---------------------------------------------------------------------------- link


@dataclass(frozen=True)
class Answer:
    """One request: time to an answer of one token, and what its handoff carried."""

    dtype: str
    mbit: int
    arm: str
    case: str
    ttft_ms: float
    kv_bytes: int
    encodings: list[str]
    predicted_ms: tuple[float, float] | None
    stages_ms: tuple[float, ...]


def ask(url: str, prompt: list[int]) -> tuple[float, str]:
    """Milliseconds to an answer of one token, and the request's id."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    began = time.perf_counter()
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", data, headers), timeout=60
    ) as reply:
        answer = json.load(reply)
    return (time.perf_counter() - began) * 1e3, answer["id"]


def find_span(url: str) -> dict[str, object]:
    """What the decode worker recorded of the latest request."""
    with urllib.request.urlopen(f"{url}/debug/requests", timeout=10) as reply:
        latest = json.load(reply)["requests"][0]["id"]
    with urllib.request.urlopen(f"{url}/debug/requests/{latest}", timeout=10) as reply:
        return json.load(reply)["decode"]


def measure_link(options: argparse.Namespace) -> list[Answer]:
    """All arms of one dtype and link in turns, on workers of their own."""
    found: list[Answer] = []
    for dtype, mbit in product(options.dtypes, options.mbit):
        environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hosts = stack.enter_context(bridged_hosts(2))
            fleet = stack.enter_context(Fleet(folder, environment))
            for host in hosts if mbit else ():
                shape(host, mbit)
            model = make_model(folder, LINK_MODEL)
            engine = LINK_ENGINES[options.engine]
            names = options.arms
            arms = {arm: start_arm(fleet, hosts, model, (arm, dtype), engine) for arm in names}
            rng = np.random.default_rng(1)
            for number in range(options.rounds + 1):
                for arm in names if number % 2 else reversed(names):
                    answers = [
                        measure_answer(arms[arm], rng, options.tokens, case)
                        for case in ("cached", "cached", "cold")
                    ]
                    print(dtype, mbit, arm, *answers, file=sys.stderr)
                    if number:  # the first of each meets, and measures, its peer
                        found += [Answer(dtype, mbit, arm, *answer) for answer in answers]
    return found


def measure_answer(
    urls: tuple[str, str], rng: np.random.Generator, num_tokens: int, case: str
) -> tuple[str, float, int, list[str], tuple[float, float] | None, tuple[float, ...]]:
    """One new prompt, over the link."""
    direct, pair = urls
    prompt = rng.integers(300, 4000, num_tokens).tolist()
    if case == "cached":
        ask(direct, prompt)
        time.sleep(0.2)
    ttft_ms, _ = ask(pair, prompt)
    span = find_span(pair)
    if span["fallbacks"] or span["transport"] != "tcp" or not span["num_received_tokens"]:
        raise AssertionError(f"not handed over: {span}")
    estimate = span["encoding_estimate"]
    predicted_ms = estimate and (estimate["raw_s"] * 1e3, estimate["encoded_s"] * 1e3)
    stages_ms = measure_stages(span["stamps"], ttft_ms)
    return case, ttft_ms, span["num_bytes"], span["encodings"], predicted_ms, stages_ms


def measure_stages(stamps: dict[str, float], ttft_ms: float) -> tuple[float, ...]:
    """Milliseconds of `STAGES`, which make up the time to an answer."""
    ends = ("received", "granted", "last_layer_landed", "first_token")
    at = [stamps[name] * 1e3 for name in ends]
    inside = [later - earlier for earlier, later in pairwise(at)]
    return (*inside, ttft_ms - (at[-1] - at[0]))


def shape(host: BridgedHost, mbit: int) -> None:
    """Limit what a host sends."""
    tc = ("tc", "-n", host.namespace)
    run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10")
    limit = ("htb", "rate", f"{mbit}mbit", "burst", "64kb", "cburst", "64kb")
    run(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:10", *limit)


def start_arm(
    fleet: Fleet,
    hosts: Sequence[BridgedHost],
    model: Path,
    what: tuple[str, str],
    engine: dict[str, object],
) -> tuple[str, str]:
    """Gateways of the prefill worker alone, and of the two workers, of an encoding and a dtype."""
    arm, dtype = what
    settings: dict[str, object] = {
        "worker.model": str(model),
        "worker.served_model_name": "bench",
        "engine.num_threads": 1,
        "engine.dtype": dtype,
        "transfer.transports": ["tcp"],
        **engine,
    }
    if arm[0].isdigit():
        settings["handoff.error_budget"] = float(arm)
    else:
        settings["handoff.encoding"] = arm
    workers: list[FleetProcess] = []
    for role, host in zip(("both", "decode"), hosts, strict=True):
        own = {"worker.host": host.address, "worker.handoff_host": host.address}
        fleet.start = partial(start_command, prefix=host.prefix)
        workers.append(fleet.start_worker(f"{role}-{arm}", role, settings | own))
    fleet.start = start_command
    for worker in workers:
        worker.wait_ready()
    prefill, decode = workers
    pair = {"gateway.mode": "push"}
    return (
        fleet.start_gateway([], [], both=[prefill]).url,
        fleet.start_gateway([prefill], [decode], settings=pair).url,
    )


# ---------------------------------------------------------------------------- output


def show_codecs(codecs: Sequence[Codec]) -> None:
    """GB for each CPU second."""
    table = Table(
        "KV",
        "dtype",
        "encoding",
        "bytes",
        "encode",
        "decode",
        title="codecs, GB for each CPU second",
    )
    for each in codecs:
        speeds = ["{1:.2f} ({0:.2f} to {2:.2f})".format(*q) for q in (each.encode, each.decode)]
        table.add_row(each.data, each.dtype, each.encoding, f"{each.share:.3f}", *speeds)
    Console().print(table)


def show_quality(rows: Sequence[dict[str, float | str]]) -> None:
    """Beside exact KV."""
    table = Table(*rows[0], title="quality")
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.3g}" for v in row.values()))
    Console().print(table)


def show_link(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Medians and quartiles, and their ratio to raw."""
    columns = ("KV", "Mbit/s", "case", "setting", "encoded", "MB", "TTFT, ms", "over raw")
    table = Table(*columns, "predicted, raw and encoded, ms", ", ".join(STAGES), title="link")
    rows: list[dict[str, object]] = []
    for dtype, mbit in dict.fromkeys((each.dtype, each.mbit) for each in answers):
        for case in ("cached", "cold"):
            raw = 0.0
            for arm in dict.fromkeys(each.arm for each in answers):
                key = dtype, mbit, case, arm
                own = [a for a in answers if (a.dtype, a.mbit, a.case, a.arm) == key]
                low, middle, high = quartiles([each.ttft_ms for each in own])
                raw = raw or middle
                megabytes = statistics.median(each.kv_bytes for each in own) / 1e6
                num_encoded = sum(bool(each.encodings) for each in own)
                predicted = [each.predicted_ms for each in own if each.predicted_ms]
                medians = [statistics.median(each) for each in zip(*predicted, strict=True)]
                stages = [
                    statistics.median(each)
                    for each in zip(*(answer.stages_ms for answer in own), strict=True)
                ]
                rows.append({
                    "dtype": dtype,
                    "mbit": mbit,
                    "case": case,
                    "setting": arm,
                    "num_answers": len(own),
                    "num_encoded": num_encoded,
                    "ttft_ms": [low, middle, high],
                    "over_raw": middle / raw,
                    "predicted_ms": medians,
                    "stages_ms": dict(zip(STAGES, stages, strict=True)),
                })
                table.add_row(
                    dtype,
                    str(mbit or "not limited"),
                    case,
                    arm,
                    f"{num_encoded} of {len(own)}",
                    f"{megabytes:.1f}",
                    f"{middle:.0f} ({low:.0f} to {high:.0f})",
                    f"{middle / raw:.2f}",
                    " and ".join(f"{each:.0f}" for each in medians),
                    ", ".join(f"{each:.0f}" for each in stages),
                )
    Console().print(table)
    return rows


def print_links(result: dict[str, Any]) -> None:
    """The table of docs/benchmarks.md, for each engine of a result."""
    for part in [name for name in result if name.startswith("link")]:
        print(f"{part}\n")
        print(f"| {' | '.join(DOC_COLUMNS)} |\n|{'---|' * len(DOC_COLUMNS)}")
        # Before the measured link decided, results did not count what was encoded.
        for link in (each for each in result[part].values() if "mbit" not in each):
            pairs = zip(link["rows"][::2], link["rows"][1::2], strict=True)
            for raw, int8 in pairs:
                times = [
                    "{1:,.0f} ({0:,.0f} to {2:,.0f})".format(*r["ttft_ms"]) for r in (raw, int8)
                ]
                row = (
                    raw["dtype"],
                    f"{link['tokens']:,}",
                    f"{raw['mbit']} Mbit/s" if raw["mbit"] else "not limited",
                    raw["case"],
                    f"{int8['num_encoded']} of {int8['num_answers']}",
                    " and ".join(f"{each:.0f}" for each in int8["predicted_ms"]),
                    *times,
                    f"{int8['over_raw']:.2f}",
                )
                print(f"| {' | '.join(row)} |")
        print_stages([row for link in result[part].values() for row in link["rows"]])


def print_stages(rows: list[dict[str, Any]]) -> None:
    """Where the time is, of results that have it."""
    print(f"\n| {' | '.join(STAGE_COLUMNS)} |\n|{'---|' * len(STAGE_COLUMNS)}")
    for row in (each for each in rows if "stages_ms" in each):
        link = f"{row['mbit']} Mbit/s" if row["mbit"] else "not limited"
        cells = [row["dtype"], link, row["case"], row["setting"]]
        cells += [f"{each:,.0f}" for each in row["stages_ms"].values()]
        print(f"| {' | '.join(cells)} |")
    print()


def main() -> None:
    """Measure what was asked for, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=["codecs", "quality", "link"])
    parser.add_argument("--text", nargs="*", type=Path, default=[])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbit", type=int, nargs="*", default=[1000, 0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--arms", nargs="*", default=["raw", "int8"])
    parser.add_argument("--engine", choices=tuple(LINK_ENGINES), default="transformers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the links of such a file")
    options = parser.parse_args()
    if options.table is not None:
        print_links(json.loads(options.table.read_text()))
        return
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        result = json.loads(options.json.read_text())
    if "codecs" in options.parts:
        codecs = measure_codecs(options)
        show_codecs(codecs)
        result["codecs"] = [asdict(each) for each in codecs]
    if "quality" in options.parts and options.text:
        rows = measure_quality(options)
        show_quality(rows)
        result["quality"] = {"windows": options.windows, "rows": rows}
    if "link" in options.parts:
        try:
            answers = measure_link(options)
        except NoNamespaceError as exc:
            sys.exit(f"link: skipped: {exc}; run it as root, with iproute2")
        links = result.setdefault("link" if options.engine == "transformers" else "link, vllm", {})
        links |= {
            f"{each.dtype}, {each.mbit} Mbit/s": {"tokens": options.tokens, "rows": []}
            for each in answers
        }
        for row in show_link(answers):
            links[f"{row['dtype']}, {row['mbit']} Mbit/s"]["rows"].append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
