"""What a worker's process states to peers, as it is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from baton.config.sections import HandoffSection, StoreSection
from baton.events.journal import CacheJournal
from baton.testing.clocks import ManualClock
from baton.transfer.region import allocate_host_region, release_region
from baton.worker.options import ProcessOptions
from baton.worker.process import _handoffs
from tests.unit.worker.scripted_engine import EPOCH, KEY, LAYOUT, ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.transfer.interface import PagedRegion


class EngineWithPages(ScriptedEngine):
    peer_mappings = None

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        shapes = [(8, LAYOUT.page_bytes(layer)) for layer in range(LAYOUT.num_layers)]
        self.pages = allocate_host_region(shapes)
        self.journal = CacheJournal(1)

    @property
    def region(self) -> PagedRegion:
        return self.pages


@pytest.fixture(name="engine")
def engine_fixture() -> Iterator[EngineWithPages]:
    engine = EngineWithPages()
    yield engine
    release_region(engine.pages)


@pytest.mark.parametrize(
    ("role", "store", "stated"),
    [
        ("decode", StoreSection(), {"kv_encodings": "int8/1"}),
        ("both", StoreSection(), {"kv_encodings": "int8/1"}),
        ("prefill", StoreSection(), {}),
        ("prefill", StoreSection(tiers=("host",), prefixes=False), {}),
        ("prefill", StoreSection(tiers=("host",)), {"kv_encodings": "int8/1"}),
    ],
)
def test_a_prefill_worker_is_as_lossy_as_what_it_may_load(
    engine: EngineWithPages, role: Any, store: StoreSection, stated: dict[str, str]
) -> None:
    options = ProcessOptions(
        name="w",
        role=role,
        credentials=KEY,
        tls="off",
        handoff=HandoffSection(encoding="int8"),
        store=store,
    )
    handoffs = _handoffs(options, engine, EPOCH, ManualClock(), transports=(), fence=None)
    try:
        assert handoffs.agent.options.traits == stated
    finally:
        for view in handoffs.agent.options.views[:-1]:
            release_region(view.region)
        if handoffs.store is not None:
            handoffs.store.access.store.close()
