from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.events.blocks import BlockStored, EventDomain, FeedHealth, Lost, WorkerBlockIndex
from baton.events.metrics import KVEventCollector
from baton.ids import WorkerId

DOMAIN = EventDomain("vllm/sha256")
WORKER = WorkerId("vllm-0")


class Feed:
    def __init__(self):
        self.health = FeedHealth(connected=True, num_gaps=2, num_replays=3, num_lost=1)
        self.events = [BlockStored(DOMAIN, (1, 2), None, b"", 0, "GPU", 0), Lost(4)]

    def poll(self):
        taken, self.events = self.events, []
        return taken


def test_a_feed_is_counted_as_it_is_polled():
    registry, feed, block_index = CollectorRegistry(), Feed(), WorkerBlockIndex(DOMAIN)
    collector = KVEventCollector(registry)
    measured = collector.watch(WORKER, feed, block_index)
    value = registry.get_sample_value
    by_worker = {"worker": WORKER}
    assert value("baton_kv_events_total", by_worker | {"type": "BlockStored"}) == 0
    [stored, lost] = measured.poll()
    assert lost == Lost(4)
    block_index.apply(stored)
    assert measured.health is feed.health
    assert value("baton_kv_events_total", by_worker | {"type": "BlockStored"}) == 1
    assert value("baton_kv_events_total", by_worker | {"type": "Lost"}) == 1
    assert value("baton_kv_event_gaps_total", by_worker) == 2
    assert value("baton_kv_event_replays_total", by_worker) == 3
    assert value("baton_kv_event_lost_total", by_worker) == 1
    assert value("baton_kv_event_connected", by_worker) == 1
    held = by_worker | {"medium": "GPU", "group": "0"}
    assert value("baton_kv_blocks_held", held) == 2
    collector.forget(WORKER)
    assert value("baton_kv_blocks_held", held) is None
