"""A worker without an engine: a handoff agent that meets another one, and measures their links."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from baton.auth.ticket import Ticket, WorkerRef
from baton.bench.orders import MeasuredLink
from baton.errors import BatonError
from baton.handoff.agent import AgentOptions, HandoffAgent
from baton.handoff.kv_views import KVView
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.kv.layout import KVLayout
from baton.transfer.interface import TRANSPORTS, TransportContext
from baton.transfer.links.outcome import NullObserver
from baton.transfer.region import allocate_shared_region, release_region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.auth.key import ClusterKey
    from baton.bench.orders import Join
    from baton.bench.workload import Direction
    from baton.clock import Clock
    from baton.transfer.interface import Transport
    from baton.transfer.links.model import LinkModel

LAYOUT: Final = KVLayout.gqa(1, 2, 64, block_size=16, dtype="bfloat16")
NUM_BLOCKS: Final = 64
TICKET_LIFE_S: Final = 60.0


class BareWorker:
    """Owner thread: the process's main one; the agent has its own.

    The driver is a worker that reads what it receives, the owner one that is written to. So the
    driver surveys both ways: it writes to who dials it, and reads from whom it dials.
    """

    def __init__(self, join: Join, host: str, key: ClusterKey, clock: Clock) -> None:
        self._clock = clock
        epoch = new_epoch()
        context = TransportContext(key, epoch, host, clock)
        self._region = allocate_shared_region([(NUM_BLOCKS, LAYOUT.page_bytes(0))])
        transports, self.absent = _build_all(join.transports, context)
        self._links = _LinksFound()
        self._agent = HandoffAgent(
            AgentOptions(
                worker=WorkerId(join.role),
                epoch=epoch,
                fingerprint="baton bench link",
                views=(KVView(LAYOUT, self._region),),
                transports=transports,
                key=key,
                clock=clock,
                host=host,
                preferred_op="READ" if join.role == "driver" else "WRITE",
            )
        )
        self._agent.observe_links(self._links)
        self._agent.start(lambda: None)
        self.ref = WorkerRef(WorkerId(join.role), epoch, self._agent.address)

    def dial(self, ref: WorkerRef) -> None:
        """Meet the other worker, as for a request of which nothing is needed any more."""
        expires_at = self._clock.unix_now() + TICKET_LIFE_S
        ticket = Ticket(new_ticket_id(), "bench", ref, self.ref, "push", expires_at)
        self._agent.decline(ticket, "only to meet")

    def wait_for_links(
        self, direction: Direction, kinds: Sequence[str], timeout_s: float
    ) -> tuple[MeasuredLink, ...]:
        """The links of these kinds that were measured, at the latest after `timeout_s`."""
        return self._links.wait_for(direction, kinds, timeout_s)

    def close(self) -> None:
        """End the agent, which closes its transports."""
        self._agent.stop()
        release_region(self._region)


class _LinksFound(NullObserver):
    """See `LinkObserver`. Told by the agent's thread, read by the other one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._models: dict[tuple[str, str], LinkModel] = {}

    def measured(self, direction: Direction, transport: str, model: LinkModel) -> None:
        """See `LinkObserver`."""
        with self._changed:
            self._models[direction, transport] = model
            self._changed.notify_all()

    def wait_for(
        self, direction: Direction, kinds: Sequence[str], timeout_s: float
    ) -> tuple[MeasuredLink, ...]:
        wanted = {(direction, kind) for kind in kinds}
        with self._changed:
            self._changed.wait_for(lambda: wanted <= self._models.keys(), timeout_s)
            found = {kind: self._models.get((direction, kind)) for kind in kinds}
        return tuple(
            MeasuredLink(kind, m.latency_s, m.descriptor_s, m.byte_s, m.num_probes)
            for kind, m in found.items()
            if m is not None
        )


def _build_all(
    options: Mapping[str, Mapping[str, object]], context: TransportContext
) -> tuple[tuple[Transport, ...], dict[str, str]]:
    """Those that work here, and why the others do not."""
    built: list[Transport] = []
    absent: dict[str, str] = {}
    for kind, given in options.items():
        try:
            built.append(TRANSPORTS.build(kind, given)(context))
        except BatonError as exc:
            absent[kind] = str(exc)[:1000]
    return tuple(built), absent
