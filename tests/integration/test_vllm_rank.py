"""One rank of a vLLM server, without the server: what it announces once its memory is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from baton.config.sections import StoreSection
from baton.engines.vllm.identity import Identity
from baton.engines.vllm.options import ConnectorOptions
from baton.engines.vllm.rank import Rank, RankPlan
from baton.ids import Epoch, WorkerId
from tests.lazy_modules import LazyModule
from tests.unit.engines_vllm.caches import (
    BLOCK_SIZE,
    allocate,
    announce,
    configure,
    kv_cache_interface,
    main_layers,
    plan,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = Identity(WorkerId("v0"), Epoch("0" * 32), "both", 1)
vllm_config = LazyModule("vllm.config")


@pytest.mark.parametrize(
    ("has_tiers", "has_window", "recomputes", "modes"),
    [
        (True, False, True, ("push", "pull", "pool")),
        (True, False, False, ("push", "pull", "pool")),
        (True, True, True, ("push", "pull")),  # its blocks behind the window cannot be kept
        (False, False, True, ("push", "pull")),
    ],
)
def test_the_mode_pool_is_announced_where_there_is_a_store_that_takes_the_pages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_tiers: bool,
    has_window: bool,
    recomputes: bool,
    modes: tuple[str, ...],
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    tiers = ("file",) if has_tiers else ()
    options = ConnectorOptions(
        transports=("tcp",),
        fingerprint="f" * 64,
        store=StoreSection(tiers=tiers, options={"file": {"directory": str(tmp_path / "store")}}),
    )
    config = configure(write_model(tmp_path / "model"))
    policy = "recompute" if recomputes else "fail"
    config.kv_transfer_config = vllm_config.KVTransferConfig(
        kv_connector="BatonConnector", kv_role="kv_both", kv_load_failure_policy=policy
    )
    window = kv_cache_interface.SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
    )
    specs = dict.fromkeys(main_layers(), window) if has_window else main_layers()
    cache = plan(config, specs)
    announce(config, tuple(specs))
    rank = Rank(RankPlan(config, cache, options, IDENTITY, rank=0))
    try:
        context = rank.pool_context()
        assert context is not None
        with context:
            tensors = allocate(cache)
        _, facts = rank.open(tensors)
        assert facts.modes == modes
        # Without recomputing, prompts are neither loaded nor kept: there is nothing to report.
        assert facts.has_store_journal is (recomputes and "pool" in modes)
    finally:
        rank.close()
