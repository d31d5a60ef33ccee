"""Passes the KV events of a vLLM server on to gateways of other hosts.

vLLM authenticates no process that follows them. So they are published to this user's processes
alone, and the server's own process follows them and records what it gets in a journal, which it
serves like all else (`AccessMiddleware`). It is not done in a rank's process, where it would take
time of vLLM's steps.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, assert_never

from baton.clock import MachineClock
from baton.events.blocks import (
    DEFAULT_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    EventDomain,
    Lost,
    Restarted,
    TiersListed,
)
from baton.events.endpoint import LiveEndpoint, ReplayEndpoint
from baton.events.journal import CacheJournal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from baton.engines.vllm.access_middleware import DrainState
    from baton.events.blocks import FeedEvent, KVEventFeed
    from baton.ids import WorkerId

DOMAIN: Final = EventDomain("vllm/sha256")
POLL_INTERVAL_S: Final = 0.1
EVENTS_PER_TURN: Final = 128
"""Recorded before requests get their turn again."""
NUM_REMEMBERED: Final = 65_536
"""Blocks: a gateway that is late by more gets all that is cached, which may be many times that."""


@asynccontextmanager
async def relay_events(
    endpoints: tuple[str, str] | None, worker: WorkerId, drain_state: DrainState
) -> AsyncGenerator[None]:
    """Follow the publisher at these endpoints (live, replay) meanwhile; None: nothing is done.

    It may start later.

    Raises:
        ConfigError: no descriptor is left.
    """
    if endpoints is None:
        yield
        return
    from baton.events.subscriber import (  # noqa: PLC0415 - zmq, which few servers need so
        KVEventSubscriber,
        SubscriberOptions,
    )

    live, replay = LiveEndpoint(endpoints[0]), ReplayEndpoint(endpoints[1])
    subscriber = KVEventSubscriber(
        SubscriberOptions(worker, DOMAIN, live, replay, rest_s=POLL_INTERVAL_S), MachineClock()
    )
    journal = CacheJournal(NUM_REMEMBERED)
    subscriber.start()
    relaying = asyncio.create_task(_relay(subscriber, journal))
    drain_state.journal = journal
    try:
        yield
    finally:
        drain_state.journal = None
        relaying.cancel()
        await asyncio.to_thread(subscriber.stop)


async def _relay(feed: KVEventFeed, journal: CacheJournal) -> None:
    while True:
        for num_recorded, event in enumerate(feed.poll(), start=1):
            record_event(journal, event)
            if num_recorded % EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(POLL_INTERVAL_S)


def record_event(journal: CacheJournal, event: FeedEvent) -> None:
    """Record what routers can use: blocks of the engine's own pool that depend on tokens alone."""
    match event:
        case BlockStored():
            num, size = len(event.hashes), event.block_size
            is_whole = size > 0 and len(event.packed_ids) == 4 * size * num
            if is_whole and _is_of_pool(event):
                num_plain = num if event.num_plain is None else event.num_plain
                journal.add_reported(event, num_plain)
        case BlockRemoved():
            if _is_of_pool(event):
                for block_hash in event.hashes:
                    journal.add_removed(block_hash)
        case AllBlocksCleared() | Restarted():
            journal.clear()
        case Lost():
            journal.clear(is_incomplete=True)
        case BlocksExpected() | EntriesStored() | EntriesRemoved() | TiersListed():
            pass  # vLLM has none
        case _ as never:
            assert_never(never)


def _is_of_pool(event: BlockStored | BlockRemoved) -> bool:
    return event.medium == DEFAULT_MEDIUM and not event.group
