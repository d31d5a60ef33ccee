"""The connector inside an installed vLLM, without a server."""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import subprocess
import sys
import warnings
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import baton.engines.vllm
from baton.engines.vllm.compatibility import check_hooks, warn_of_graphs
from baton.engines.vllm.rank_observer import HandoffRecord
from baton.engines.vllm.step_orders import Decline, Prompt, StepOrders, StepReport
from baton.errors import ConfigError
from tests.lazy_modules import LazyModule, skip_without_vllm
from tests.unit.engines_vllm.caches import configure, write_model
from tests.unit.engines_vllm.test_handoff_schedule import prompt

skip_without_vllm()

if TYPE_CHECKING:
    from pathlib import Path

base = LazyModule("vllm.distributed.kv_transfer.kv_connector.v1.base")
connector = LazyModule("baton.engines.vllm.connector")
vllm_stats = LazyModule("baton.engines.vllm.stats")
SENT = HandoffRecord(
    side="sent",
    transport="shared",
    expected_transport="shared",
    num_bytes=4096,
    num_pages=2,
    wait_s=0.25,
)
RECEIVED = HandoffRecord(
    side="received",
    transport="tcp",
    expected_transport="shared",
    num_bytes=8192,
    num_pages=4,
    wait_s=0.5,
    transfer_s=0.125,
)
LOST = HandoffRecord(
    side="received",
    transport="none",
    expected_transport="none",
    num_bytes=0,
    num_pages=0,
    wait_s=1.0,
    failed_stage="granted",
)


@pytest.mark.parametrize(
    ("mode", "is_late"),
    [
        ("FULL", True),
        ("FULL_AND_PIECEWISE", False),
        ("FULL_DECODE_ONLY", False),
        ("PIECEWISE", False),
        ("NONE", False),
    ],
)
def test_prompts_in_full_graphs_are_warned_of(
    mode: str, is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    compilation = LazyModule("vllm.config.compilation")
    config = compilation.CompilationConfig(cudagraph_mode=mode)
    with caplog.at_level(logging.WARNING):
        warn_of_graphs(config)
    assert ("layers are all sent after" in caplog.text) == is_late


def test_vllm_may_use_full_graphs() -> None:
    assert not connector.BatonConnector.requires_piecewise_for_cudagraph({})


def test_pages_with_adjacent_bytes_are_asked_for(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    assert connector.BatonConnector.get_required_kvcache_layout(config) == "LBHNC"
    config.model_config = None
    assert connector.BatonConnector.get_required_kvcache_layout(config) is None


def test_it_is_what_vllm_asks_for() -> None:
    asked_for = connector.BatonConnector
    assert baton.engines.vllm.BatonConnector is asked_for
    assert issubclass(asked_for, base.KVConnectorBase_V1)
    assert issubclass(asked_for, base.SupportsHMA)
    assert not inspect.isabstract(asked_for)
    parameters = inspect.signature(asked_for).parameters
    assert list(parameters) == ["vllm_config", "role", "kv_cache_config"]
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = baton.engines.vllm.Other  # type: ignore[attr-defined]


def test_every_hook_takes_what_vllms_own_takes() -> None:
    vllms = base.KVConnectorBase_V1, base.SupportsHMA
    for name, ours in vars(connector.BatonConnector).items():
        theirs = getattr(vllms[0], name, None) or getattr(vllms[1], name, None)
        if name.startswith("_") or not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        needed = [p for p in inspect.signature(theirs).parameters if p != "kwargs"]
        assert [p for p in inspect.signature(ours).parameters if p != "kwargs"] == needed, name


def test_a_vllm_without_a_needed_hook_is_refused() -> None:
    class Old:
        pass

    with pytest.raises(ConfigError, match=r"bind_connector_metadata.*0\.32"):
        check_hooks(Old)
    check_hooks(base.KVConnectorBase_V1)


def test_importing_the_package_loads_no_framework() -> None:
    code = (
        "import sys, baton.engines, baton.engines.vllm, baton.engines.vllm.options;"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def import_connector_alone() -> None:
    """In a process that has loaded vLLM: as if it had none of Baton's modules."""
    warnings.simplefilter("ignore")
    before = sys.modules["baton.engines.vllm.connector"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "baton"]:
        del sys.modules[name]
    anew = importlib.import_module("baton.engines.vllm").BatonConnector
    assert anew is not before.BatonConnector
    assert "baton.handoff.agent" not in sys.modules


def test_the_connector_itself_loads_no_agent() -> None:
    assert connector.BatonConnector, "it is loaded before the fork"
    process = get_context("fork").Process(target=import_connector_alone)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_crosses_between_vllms_processes_is_pickled() -> None:
    told: Prompt = prompt(9)
    orders = StepOrders(declined=(Decline(told, "cached"),), preempted=("r",))
    assert pickle.loads(pickle.dumps(connector.StepMetadata(orders, True))).orders == orders
    first, second = (
        connector.RankReport(StepReport(((name, why),))) for name, why in (("a", "x"), ("b", "y"))
    )
    both = first.aggregate(pickle.loads(pickle.dumps(second)))
    assert both.report.failed_sends == (("a", "x"), ("b", "y"))


def stats(*records: HandoffRecord, **refused: int) -> Any:
    found = vllm_stats.BatonStats.of(records, refused)
    assert found is not None
    return found


def test_statistics_add_up_over_ranks_and_steps() -> None:
    assert vllm_stats.BatonStats.of((), {}) is None
    whole = stats(SENT, stale_ticket=1).aggregate(stats(RECEIVED, LOST, stale_ticket=2))
    rebuilt = connector.BatonConnector.build_kv_connector_stats(data=whole.to_dict())
    assert not rebuilt.is_empty()
    assert rebuilt.reduce() == {
        "baton sent": 1,
        "sent MB": 0.004,
        "sent wait ms (mean)": 250.0,
        "sent failed": 0,
        "baton received": 1,
        "received MB": 0.008,
        "received wait ms (mean)": 750.0,
        "received failed": 1,
        "refused tickets": 3,
    }
    rebuilt.reset()
    assert rebuilt.is_empty()


def test_statistics_become_metrics_with_vllms_labels() -> None:
    registry = CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=registry)

    class Config:
        kv_transfer_config = None

    metrics = vllm_stats.BatonPromMetrics(
        Config(),
        {kind: made(kind) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    metrics.observe(stats(SENT, RECEIVED, LOST, stale_ticket=2).to_dict(), 0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"vllm:baton_{name}", {"model_name": "m", "engine": "0", **labels}
        )

    assert value("handoffs_total", side="sent", transport="shared") == 1
    assert value("bytes_total", side="received", transport="tcp") == 8192
    assert value("pages_total", side="sent", transport="shared") == 2
    assert value("failed_handoffs_total", side="received", stage="granted", transport="none") == 1
    assert value("refused_tickets_total", code="stale_ticket") == 2
    assert value("transport_mismatches_total", expected="shared", used="tcp") == 1
    assert value("handoff_seconds_sum", transport="tcp") == 0.125
    assert value("load_wait_seconds_count", transport="tcp") == 1
    assert value("transport_mismatches_total", expected="shared", used="shared") is None
