"""The connector between vLLM's own two model runners and one rank with a scripted agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.vllm.options import ConnectorOptions
from baton.engines.vllm.rank_handoffs import MIN_WAIT_S
from baton.engines.vllm.step_orders import NO_ORDERS
from tests.lazy_modules import LazyModule, skip_without_vllm
from tests.unit.engines_vllm.test_rank_handoffs import ID, expect, harness, offer

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engines.vllm.step_orders import StepOrders
    from tests.unit.engines_vllm.test_rank_handoffs import RankHarness

skip_without_vllm()

__all__ = ["harness"]  # a fixture
connector = LazyModule("baton.engines.vllm.connector")
transfer_state = LazyModule("vllm.distributed.kv_transfer.kv_transfer_state")
config = LazyModule("vllm.config")
context = LazyModule("vllm.forward_context")
runner_v1 = LazyModule("vllm.v1.worker.kv_connector_model_runner_mixin")
runner_v2 = LazyModule("vllm.v1.worker.gpu.kv_connector")
layer_hooks = LazyModule("vllm.model_executor.layers.attention.kv_transfer_utils")


def planned(orders: StepOrders, *, has_tokens: bool) -> Any:
    """One step of the scheduler's process, as its workers receive it."""
    plan = SimpleNamespace(
        total_num_scheduled_tokens=int(has_tokens), has_sync_kv_loads=False, finished_req_ids=set()
    )
    scheduler = SimpleNamespace(_scheduler=SimpleNamespace(step=lambda _: orders))
    metadata = connector.BatonConnector.build_connector_meta(scheduler, plan)
    plan.kv_connector_metadata = metadata
    return plan


def forward(*layers: str) -> None:
    """Attention of these layers, as vLLM wraps it; of a full graph's replay there are none."""
    attend = layer_hooks.maybe_transfer_kv_layer(lambda layer_name: layer_name)
    vllm_config = config.VllmConfig()
    for layer in layers:
        vllm_config.compilation_config.static_forward_context[layer] = SimpleNamespace(
            kv_cache=None
        )
    metadata = dict.fromkeys(layers, "of a batch")
    with context.set_forward_context(metadata, vllm_config, slot_mapping={}):
        for layer in layers:
            attend(layer)


def run_v1(plan: Any, *layers: str) -> Any:
    """A step as in `vllm.v1.worker.gpu_model_runner`."""
    mixin = runner_v1.KVConnectorModelRunnerMixin
    transfer_state.get_kv_transfer_group().handle_preemptions(plan.kv_connector_metadata)
    if not plan.total_num_scheduled_tokens:
        return mixin.kv_connector_no_forward(plan, config.VllmConfig()).kv_connector_output
    with (
        context.set_forward_context({}, config.VllmConfig()),
        mixin.maybe_get_kv_connector_output(plan) as output,
    ):
        forward(*layers)
    return output


def run_v2(plan: Any, *layers: str) -> Any:
    """A step as in `vllm.v1.worker.gpu.model_runner`: loads start after the forward pass."""
    runner = runner_v2.ActiveKVConnector(config.VllmConfig(), {})
    if not plan.total_num_scheduled_tokens:
        return runner.no_forward(plan).kv_connector_output
    batch = SimpleNamespace(idx_mapping=None, req_ids=["r"], num_tokens=1)
    with context.set_forward_context({}, config.VllmConfig()):
        runner.pre_forward(plan, batch)
    forward(*layers)
    runner.finish_forward()
    return runner.post_forward(plan.finished_req_ids)


@pytest.fixture
def rank(harness: RankHarness, monkeypatch: pytest.MonkeyPatch) -> RankHarness:
    """Behind the connector of this process, as of a worker of vLLM's."""
    ours = object.__new__(connector.BatonConnector)
    ours._options, ours._rank = ConnectorOptions(), None
    ours._worker, ours._wait_s, ours._connector_metadata = harness.rank, 0.0, None
    ours._computes = False
    ours.register_kv_caches = lambda _: None
    ours.get_kv_connector_stats = lambda: None
    module = "vllm.distributed.kv_transfer.kv_transfer_state"
    monkeypatch.setattr(f"{module}._KV_CONNECTOR_AGENT", ours)
    return harness


@pytest.mark.parametrize("run", [run_v1, run_v2])
def test_only_a_step_without_tokens_waits_for_a_load(
    rank: RankHarness, run: Callable[[Any], Any]
) -> None:
    run(planned(expect(rank), has_tokens=True))
    for _ in range(3):
        run(planned(NO_ORDERS, has_tokens=True))
    assert rank.wake_event.num_waits == 0
    most_s = ConnectorOptions().poll_interval_ms / 1000
    for wait_s in (MIN_WAIT_S, most_s):  # at once, and after a second without news
        before = rank.clock.now()
        run(planned(NO_ORDERS, has_tokens=False))
        assert rank.clock.now() - before == pytest.approx(wait_s)
        rank.clock.advance(1.0)
    assert rank.wake_event.num_waits == 2
    rank.port.land(ID)
    assert run(planned(NO_ORDERS, has_tokens=True)).finished_recving == {"r"}
    assert rank.wake_event.num_waits == 2


@pytest.mark.parametrize("run", [run_v1, run_v2])
@pytest.mark.parametrize("hooked", [(), ("a",), ("a", "b")])
def test_a_step_sends_all_layers_whatever_part_of_it_is_a_graph(
    rank: RankHarness, run: Callable[..., Any], hooked: tuple[str, ...]
) -> None:
    """Eager and piecewise passes call the hooks of all layers, a full graph's replay of none."""
    run(planned(offer(rank, 5, 5, (5, 6)), has_tokens=True), *hooked)
    assert rank.port.sends[ID].ready == {0: 5, 1: 5}
    assert rank.port.sends[ID].is_finished


def test_a_full_graph_is_reported_before_the_sampling(rank: RankHarness) -> None:
    """As `run_fullgraph` is called in `vllm.v1.worker.gpu.model_runner`: without a context."""
    runner = runner_v2.ActiveKVConnector(config.VllmConfig(), {})
    batch = SimpleNamespace(idx_mapping=None, req_ids=["r"], num_tokens=1)
    runner.pre_forward(planned(offer(rank, 5, 5, (5, 6)), has_tokens=True), batch)
    assert not rank.port.sends[ID].is_finished
    runner.finish_forward()
    assert rank.port.sends[ID].is_finished
    runner.post_forward(set())


def test_hooks_of_warm_up_and_capture_report_nothing(rank: RankHarness) -> None:
    reported: list[int] = []
    rank.port.layer_ready = lambda _, layer, __: reported.append(layer)  # type: ignore[method-assign]
    forward("a", "b")  # model runner V1: no step's metadata is bound
    runner = runner_v2.ActiveKVConnector(config.VllmConfig(), {})
    runner.set_disabled(True)
    runner.pre_forward(SimpleNamespace())
    forward("a", "b")
    runner.finish_forward()
    assert runner.post_forward(set()) is None
    runner.set_disabled(False)
    runner.reset_capture_state()
    assert reported == []
    run_v2(planned(offer(rank, 5, 3, (5,)), has_tokens=True), "a", "b")
    assert reported == [0, 1]
