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


def test_the_feeds_of_one_worker_are_added_up():
    registry, own, of_store = CollectorRegistry(), Feed(), Feed()
    collector = KVEventCollector(registry)
    of_store.health = FeedHealth(connected=False, num_gaps=5)
    for feed, domain in ((own, DOMAIN), (of_store, EventDomain("baton/sha256"))):
        block_index = WorkerBlockIndex(domain)
        block_index.apply(BlockStored(domain, (1, 2), None, b"", 0, "GPU", 0))
        collector.watch(WORKER, feed, block_index).poll()
    value, by_worker = registry.get_sample_value, {"worker": WORKER}
    assert value("baton_kv_events_total", by_worker | {"type": "Lost"}) == 2
    assert value("baton_kv_event_gaps_total", by_worker) == 7
    assert value("baton_kv_event_connected", by_worker) == 0
    assert value("baton_kv_blocks_held", by_worker | {"medium": "GPU", "group": "0"}) == 4
    collector.forget(WORKER)
    assert value("baton_kv_event_connected", by_worker) is None
