"""The connector inside an installed vLLM, without a server."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
import warnings
from multiprocessing import get_context
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import baton.engines.vllm
from baton.engines.vllm.compatibility import check_hooks
from baton.engines.vllm.rank_observer import HandoffRecord
from baton.engines.vllm.step_orders import Decline, Prompt, StepOrders, StepReport
from baton.errors import ConfigError
from tests.unit.engines_vllm.test_handoff_schedule import prompt

with warnings.catch_warnings():
    # What vLLM and torch say of themselves while they load is not ours to repair.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from baton.engines.vllm.connector import RankReport, StepMetadata
    from baton.engines.vllm.stats import BatonPromMetrics, BatonStats

CONNECTOR = baton.engines.vllm.BatonConnector
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


def test_it_is_what_vllm_asks_for() -> None:
    assert issubclass(CONNECTOR, KVConnectorBase_V1)
    assert issubclass(CONNECTOR, SupportsHMA)
    assert not inspect.isabstract(CONNECTOR)
    parameters = inspect.signature(CONNECTOR).parameters
    assert list(parameters) == ["vllm_config", "role", "kv_cache_config"]
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = baton.engines.vllm.Other  # type: ignore[attr-defined]


def test_every_hook_takes_what_vllms_own_takes() -> None:
    for name, ours in vars(CONNECTOR).items():
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if name.startswith("_") or not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        needed = [p for p in inspect.signature(theirs).parameters if p != "kwargs"]
        assert [p for p in inspect.signature(ours).parameters if p != "kwargs"] == needed, name


def test_a_vllm_without_a_needed_hook_is_refused() -> None:
    class Old:
        pass

    with pytest.raises(ConfigError, match=r"bind_connector_metadata.*0\.32"):
        check_hooks(Old)
    check_hooks(KVConnectorBase_V1)


def test_importing_the_package_loads_no_framework() -> None:
    code = (
        "import sys, baton.engines, baton.engines.vllm, baton.engines.vllm.options;"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def import_connector_alone() -> None:
    """In a process that has loaded vLLM: as if it had none of Baton's modules."""
    warnings.simplefilter("ignore")
    for name in [name for name in sys.modules if name.partition(".")[0] == "baton"]:
        del sys.modules[name]
    assert importlib.import_module("baton.engines.vllm").BatonConnector is not CONNECTOR
    assert "baton.handoff.agent" not in sys.modules


def test_the_connector_itself_loads_no_agent() -> None:
    process = get_context("fork").Process(target=import_connector_alone)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_crosses_between_vllms_processes_is_pickled() -> None:
    told: Prompt = prompt(9)
    orders = StepOrders(declined=(Decline(told, "cached"),), preempted=("r",))
    assert pickle.loads(pickle.dumps(StepMetadata(orders))).orders == orders
    first, second = RankReport(StepReport((("a", "x"),))), RankReport(StepReport((("b", "y"),)))
    both = first.aggregate(pickle.loads(pickle.dumps(second)))
    assert both.report.failed_sends == (("a", "x"), ("b", "y"))


def stats(*records: HandoffRecord, **refused: int) -> BatonStats:
    found = BatonStats.of(records, refused)
    assert found is not None
    return found


def test_statistics_add_up_over_ranks_and_steps() -> None:
    assert BatonStats.of((), {}) is None
    whole = stats(SENT, stale_ticket=1).aggregate(stats(RECEIVED, LOST, stale_ticket=2))
    rebuilt = CONNECTOR.build_kv_connector_stats(data=whole.to_dict())
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

    metrics = BatonPromMetrics(
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
