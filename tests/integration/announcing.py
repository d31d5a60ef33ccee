"""Gateways' listeners for announcements and workers' announcers, real ones, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.gateway.members.listener import open_announcements
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.ids import Epoch, WorkerId, new_epoch
from baton.protocol.announcements import Announcement
from baton.protocol.worker_http import Role
from baton.worker.announcer import Announcer
from baton.worker.fence import MembershipFence, Standing
from tests.free_ports import find_free_port

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from baton.config.sections import Tls
    from baton.gateway.members.announced import AnnouncedWorkers

CLUSTER_KEY = ClusterKey(b"k" * 32)
KEY = Credentials.of(CLUSTER_KEY)
STATIC = (WorkerAddress("https://127.0.0.1:1", Role.BOTH),)
LEASE_S = 2.0


@dataclass
class Gateway:
    url: str
    members: AnnouncedWorkers
    registry: CollectorRegistry

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def epoch_of(self, worker: str) -> str | None:
        lease = self.members.table.find(WorkerId(worker))
        return None if lease is None else lease.announcement.epoch


@contextlib.asynccontextmanager
async def gateway(
    *peers: str, credentials: Credentials = KEY, port: int | None = None, tls: Tls = "control"
) -> AsyncGenerator[Gateway]:
    """A gateway's source `announced`, without the rest of a gateway."""
    port = port or find_free_port()
    options = GatewayOptions(
        addresses=STATIC,
        credentials=credentials,
        key_origin="configured",
        members=("announced",),
        announce_port=port,
        peers=peers,
        tls=tls,
    )
    registry = CollectorRegistry()
    async with open_announcements(options, MachineClock(), registry) as members:
        assert members is not None
        yield Gateway(f"https://127.0.0.1:{port}", members, registry)


@dataclass
class Life:
    """One epoch of a worker that announces itself; `standings` are those that it was in."""

    epoch: Epoch
    announcer: Announcer
    fence: MembershipFence
    standings: list[Standing] = field(default_factory=list)
    running: asyncio.Task[None] | None = None

    @property
    def standing(self) -> Standing:
        return self.fence.look(MachineClock().now())

    def kill(self) -> None:
        """As SIGKILL does, where nothing listens at its address."""
        self.stop()
        for each in self.announcer._gateways.values():
            each.client.close()

    def stop(self) -> None:
        """As SIGSTOP does: nothing more is sent, and what arrives is not read."""
        assert self.running is not None
        self.running.cancel()


@contextlib.asynccontextmanager
async def life(
    name: str,
    url: str,
    *gateways: str,
    credentials: Credentials | None = None,
    takes_leave: bool = True,
    **fields: Any,
) -> AsyncGenerator[Life]:
    """A worker's announcer, without the rest of a worker."""
    credentials = credentials or Credentials.of(CLUSTER_KEY)  # its own, as each process has
    epoch = new_epoch()
    given: dict[str, Any] = {"role": Role.BOTH, "lease_s": LEASE_S, "sequence": 1}
    template = Announcement(worker=WorkerId(name), epoch=epoch, url=url, **(given | fields))
    fence, standings = MembershipFence(template.lease_s), list[Standing]()
    announcer = Announcer(
        template,
        gateways,
        credentials,
        clock=MachineClock(),
        fence=fence,
        on_change=standings.append,
    )
    alive = Life(epoch, announcer, fence, standings)
    alive.running = asyncio.create_task(announcer.run())
    try:
        yield alive
    finally:
        alive.running.cancel()
        await asyncio.gather(alive.running, return_exceptions=True)
        if takes_leave:
            await announcer.leave()
        else:
            announcer._heartbeats.close()
