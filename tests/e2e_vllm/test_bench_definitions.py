"""What `baton bench serve` and `baton size` say, against vLLM's own code; no server is started."""

from __future__ import annotations

import numpy as np
import pytest

from baton.bench.load.records import Record, Slo, compute_figures
from baton.bench.load.stream import Tokens
from baton.kv.sizing.parts import State
from baton.kv.sizing.sizes import Terms, compute_sizes
from baton.planner.sizing import find_model
from tests.lazy_modules import LazyModule, skip_without_vllm

skip_without_vllm()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM's imports


@pytest.fixture(scope="module", autouse=True)
def _quietly_loaded():
    assert LazyModule("vllm").version


def make_records(num=60):
    rng = np.random.default_rng(11)
    found = []
    for index in range(num):
        sent_s = float(rng.uniform(0, 20))
        times = sent_s + np.cumsum(rng.lognormal(-2, 1, rng.integers(1, 30)))
        # Some chunks carry several tokens: the count is larger than the number of chunks.
        num_output = len(times) + int(rng.integers(0, 3))
        found.append(
            Record(
                index=index, conversation=index, sent_s=sent_s,
                token_s=tuple(times.tolist()), ended_s=float(times[-1]),
                tokens=Tokens(int(rng.integers(1, 100)), num_output), finish_reason="length",
            )
        )  # fmt: skip
    return found


def test_figures_are_those_that_vllms_client_computes():
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput  # noqa: PLC0415
    from vllm.benchmarks.serve import calculate_metrics  # noqa: PLC0415

    records, window_s = make_records(), 60.0
    outputs = [
        RequestFuncOutput(
            success=True, latency=record.e2e_s, output_tokens=record.num_output_tokens,
            ttft=record.ttft_s, itl=list(record.itl_s), prompt_len=record.num_prompt_tokens,
            start_time=record.sent_s,
        )
        for record in records
    ]  # fmt: skip
    bounds = {"ttft": 200.0, "tpot": 300.0, "e2el": 5000.0}
    theirs, _ = calculate_metrics([], outputs, window_s, None, [50.0, 90.0, 99.0], bounds)
    ours = compute_figures(records, window_s, Slo(0.2, 0.3, 5.0))
    assert ours.num_complete == theirs.completed
    assert ours.requests_per_s == pytest.approx(theirs.request_throughput)
    assert ours.output_tokens_per_s == pytest.approx(theirs.output_throughput)
    assert ours.total_tokens_per_s == pytest.approx(theirs.total_token_throughput)
    assert 0 < ours.goodput.requests_per_s < ours.requests_per_s
    assert ours.goodput.requests_per_s == pytest.approx(theirs.request_goodput)
    for name, found in (
        ("ttft", ours.ttft_s), ("tpot", ours.tpot_s), ("itl", ours.itl_s), ("e2el", ours.e2e_s),
    ):  # fmt: skip
        assert found.mean * 1e3 == pytest.approx(getattr(theirs, f"mean_{name}_ms"))
        percentiles = dict(getattr(theirs, f"percentiles_{name}_ms"))
        for share, value in ((50.0, found.p50), (90.0, found.p90), (99.0, found.p99)):
            assert value * 1e3 == pytest.approx(percentiles[share])


def test_pages_are_as_large_as_vllms():
    import torch  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec  # noqa: PLC0415

    llama = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    sizes = compute_sizes(find_model("llama-3.1-8b")[0], Terms(160, block_size=16))
    assert sizes.kept_bytes == 10 * 32 * llama.page_size_bytes
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    sizes = compute_sizes(find_model("deepseek-v3")[0], Terms(640, block_size=64))
    assert sizes.kept_bytes == 10 * 61 * latent.page_size_bytes


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_states_are_as_large_as_vllms(num_shards):
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes  # noqa: PLC0415

    def check(state, shapes):
        conv, recurrent = (int(np.prod(shape)) for shape in shapes)
        assert state.conv_numbers(num_shards) == conv
        assert state.recurrent_numbers_of(num_shards) == recurrent

    def state_of(model):
        parts = [part for layer in find_model(model)[0].layers for part in layer]
        return next(part for part in parts if isinstance(part, State))

    check(
        state_of("nemotron-h-8b"), Shapes.mamba2_state_shape(num_shards, 8192, 8, 128, 64, 128, 4)
    )
    check(
        state_of("qwen3-next-80b-a3b"),
        Shapes.gated_delta_net_state_shape(num_shards, 16, 32, 128, 128, 4),
    )
