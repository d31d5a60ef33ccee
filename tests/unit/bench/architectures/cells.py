"""Cells and plans that are made up, for tests of what is said about them."""

from __future__ import annotations

from baton.bench.architectures.analysis import Samples, analyse
from baton.bench.architectures.plan import Effort, Plan, choose_configurations, read_levels
from baton.bench.architectures.results import (
    Cell,
    ConfigurationInfo,
    Findings,
    LevelInfo,
    Proof,
    Stages,
)
from baton.bench.architectures.usage import CpuUse
from baton.bench.files import RunManifest
from baton.bench.load.records import Record, Slo, compute_figures
from baton.bench.load.runner import ClientLoad
from baton.bench.load.server_check import RequestOptions
from baton.bench.load.stream import Tokens
from baton.bench.workloads.synthetic import Lengths, fixed_lengths
from baton.rig.machine import Machine

QUIET = ClientLoad(0.1, 0.0, 0.0, 0.0, 0.0, None, ())
WINDOW_S = 10.0
MACHINE = Machine("host", "6.1", "a CPU", 2, 2**33, "3.11", {}, (0.0, 0.0, 0.0))


def make_plan(concurrency="1,2,4,8", repetitions=5, workers=2, **changes):
    given = {
        "num_workers": workers,
        "engine": "transformers",
        "model": "demo",
        "configurations": choose_configurations(workers),
        "levels": read_levels(concurrency, None),
        "workload": fixed_lengths(Lengths(100, 10), "balanced"),
        "request_options": RequestOptions(),
        "effort": Effort(repetitions, WINDOW_S, None, 60.0),
        "seed": "seed",
        "slo": Slo(ttft_s=1.0),
    }
    return Plan(**(given | changes))


def make_records(num_requests, ttft_s=0.1, num_cached=None):
    """Requests of 100 tokens in and 10 out, evenly over the window."""
    records = []
    for i in range(num_requests):
        sent_s = i * WINDOW_S / num_requests * 0.9
        times = tuple(sent_s + ttft_s + 0.01 * token for token in range(10))
        records.append(
            Record(
                index=i, conversation=i, sent_s=sent_s, token_s=times, ended_s=times[-1],
                tokens=Tokens(100, 10, num_cached), status=200, finish_reason="length",
            )
        )  # fmt: skip
    return tuple(records)


def make_proof(**changes):
    given = {
        "num_requests": 10, "num_untraced": 0, "num_not_handed_over": 0, "num_prompt_tokens": 1000,
        "num_cached_tokens": 0, "num_needed_tokens": 1000, "num_received_tokens": 1000,
        "num_bytes": 1000, "modes": {"push": 10}, "transports": {"shared": 10}, "fallbacks": {},
    }  # fmt: skip
    return Proof(**(given | changes))


def make_samples(arm, level, repetition, num_requests, **changes):
    records = make_records(num_requests, changes.pop("ttft_s", 0.1))
    given = {
        "configuration": arm, "level": level, "repetition": repetition, "run": "run.json",
        "figures": compute_figures(records, WINDOW_S, Slo()), "client": QUIET,
        "cpu": CpuUse({"worker-0": 4.0, "worker-1": 4.0}, 1.0, 0.5, WINDOW_S, 0.0),
        "num_tokens": 110 * num_requests, "load": (0.0, 0.0, 0.0),
        "stages": Stages(0.0, 0.1, None, None),
        "proof": make_proof() if "P" in arm else None, "ended_early": None,
    }  # fmt: skip
    return Samples(Cell(**(given | changes)), records)


def measure(plan, rates):
    """`rates[arm][level]` requests in the window, a little more in each repetition."""
    return [
        make_samples(arm, level, repetition, num + repetition)
        for arm, levels in rates.items()
        for level, num in levels.items()
        for repetition in range(1, plan.effort.num_repetitions + 1)
    ]


def make_findings(plan, measured, troubles=()):
    return Findings(
        is_partial=False, ended=None,
        manifest=RunManifest(
            baton="0", started_at="now", command=("bench",), machine=MACHINE,
            load_after=(0.0, 0.0, 0.0),
        ),
        engine="transformers", model="<demo>", num_workers=2, workload="balanced",
        workload_words="100 in", seed="s",
        num_repetitions=plan.effort.num_repetitions, duration_s=10.0, order=(),
        configurations=tuple(
            ConfigurationInfo(a.name, a.num_both, a.num_prefill, a.num_decode, {})
            for a in plan.configurations
        ),
        levels=tuple(
            LevelInfo(v.key, v.words, v.load.concurrency, None) for v in plan.levels
        ),
        cells=tuple(each.cell for each in measured), troubles=tuple(troubles), warnings=(),
        analysis=analyse(plan, measured, troubles),
    )  # fmt: skip
