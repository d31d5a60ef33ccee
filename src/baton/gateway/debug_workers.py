"""`/debug/workers`: who is up, and which blocks does each hold?"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from baton.events.blocks import FeedHealth
from baton.gateway.kv_events import Followed, NotFollowed
from baton.gateway.workers import Down, Draining, Pending, Rejected, Up
from baton.router.fleet import Role, WorkerLoad

if TYPE_CHECKING:
    from baton.gateway.kv_events import Following, KVEvents
    from baton.gateway.workers import Worker, Workers


class CachedBlocks(msgspec.Struct, frozen=True):
    """How many blocks of one kind a worker holds."""

    medium: str
    group: int
    num_blocks: int


class FollowedEvents(msgspec.Struct, frozen=True):
    """A worker's KV events. `problem` says why they are not followed, if they are not."""

    endpoint: str
    problem: str | None = None
    blocks: tuple[CachedBlocks, ...] = ()
    feed: FeedHealth | None = None


class ListedWorker(msgspec.Struct, frozen=True):
    """One worker of the operator's list.

    `kv_events` is null where it publishes none, `load` where it does not say how full it is.
    """

    worker: str | None
    epoch: str | None
    url: str
    role: Role
    state: str
    reason: str | None
    kv_events: FollowedEvents | None
    load: WorkerLoad | None = None


class WorkerListReply(msgspec.Struct, frozen=True):
    """The answer to `/debug/workers`, in the order of the operator's list."""

    workers: tuple[ListedWorker, ...]


class WorkerList:
    """Shows the workers as the gateway sees them now."""

    def __init__(self, workers: Workers, events: KVEvents) -> None:
        self._workers, self._events = workers, events

    def show(self) -> WorkerListReply:
        """All workers."""
        return WorkerListReply(tuple(self._show(worker) for worker in self._workers.all))

    def _show(self, worker: Worker) -> ListedWorker:
        following = self._events.of(worker)
        return ListedWorker(
            worker=worker.info.worker if worker.info else None,
            epoch=worker.info.epoch if worker.info else None,
            url=str(worker.url),
            role=worker.address.role,
            state=type(worker.state).__name__.lower(),
            reason=_reason(worker),
            kv_events=None if following is None else _show_events(following),
            load=worker.load,
        )


def _reason(worker: Worker) -> str | None:
    match worker.state:
        case Pending(reason) | Down(_, reason) | Rejected(reason):
            return reason
        case Up() | Draining():
            return None
        case _ as never:
            assert_never(never)


def _show_events(following: Following) -> FollowedEvents:
    endpoint = following.publisher.source.endpoint
    match following:
        case NotFollowed(reason=reason):
            return FollowedEvents(endpoint, problem=reason)
        case Followed(feed=feed, block_index=block_index):
            held = sorted(block_index.num_blocks.items())
            blocks = tuple(CachedBlocks(*key, num_blocks) for key, num_blocks in held)
            return FollowedEvents(endpoint, blocks=blocks, feed=feed.health)
        case _ as never:
            assert_never(never)
