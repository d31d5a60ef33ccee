"""A worker whose engine has a server of its own, as a member of a cluster.

The server's process announces the worker, and keeps the time until which its agents, which live in
other processes, may write to others.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.handoff.lease_file import LeaseFile
from baton.protocol.announcements import Announcement
from baton.protocol.worker_http import Role
from baton.worker.announcer import SUPERSEDED, Announcer, SupersededError
from baton.worker.fence import MembershipFence, Standing
from baton.worker.options import check_announcing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from baton.auth.credentials import Credentials
    from baton.clock import Clock, Instant
    from baton.config.sections import WorkerSection
    from baton.ids import Epoch, WorkerId

logger = logging.getLogger(__name__)


class _SharedFence(MembershipFence):
    """One whose end other processes read, too."""

    def __init__(self, lease_s: float, lease: LeaseFile) -> None:
        super().__init__(lease_s)
        self._lease = lease

    def accepted(self, sequence: int, now: Instant) -> None:
        super().accepted(sequence, now)
        self._lease.extend(self.until)


class AnnouncedServer:
    """Implements `ServerMembership`. Owner: the event loop's thread, but for `open`.

    Raises:
        ConfigError: no gateway could reach what would be announced.
    """

    def __init__(
        self, section: WorkerSection, credentials: Credentials, clock: Clock, topology: str
    ) -> None:
        check_announcing(section.announce_to, section.announce_url, section.host)
        self._section, self._credentials = section, credentials
        self._clock, self._topology = clock, topology
        self._fence: _SharedFence | None = None
        self._announcer: Announcer | None = None

    def open(self, lease_file: Path) -> None:
        """See `ServerMembership`."""
        self._fence = _SharedFence(self._section.announce_lease_s, LeaseFile.create(lease_file))

    def why_fenced(self) -> str | None:
        """See `ServerMembership`."""
        return None if self._fence is None else self._fence.explain(self._clock.now())

    async def run(
        self, worker: WorkerId, epoch: Epoch, url: str, on_fenced: Callable[[str], None]
    ) -> int:
        """See `ServerMembership`."""
        section, fence = self._section, self._fence
        assert fence is not None, "open comes first"  # noqa: S101

        def note(standing: Standing) -> None:
            if standing is Standing.SERVING:
                logger.info("a gateway has accepted %s: it serves", worker)
            else:
                on_fenced(self.why_fenced() or standing)

        self._announcer = Announcer(
            Announcement(
                worker=worker,
                epoch=epoch,
                url=(section.announce_url or url).rstrip("/"),
                role=Role(section.role),
                lease_s=section.announce_lease_s,
                sequence=1,
                topology=self._topology,
            ),
            section.announce_to,
            self._credentials,
            clock=self._clock,
            fence=fence,
            on_change=note,
        )
        try:
            await self._announcer.run()
        except SupersededError as exc:
            logger.critical("announcing has ended: %s", exc)
        return SUPERSEDED

    async def leave(self) -> None:
        """See `ServerMembership`."""
        if self._announcer is not None:
            await self._announcer.leave()
