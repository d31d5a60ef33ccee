"""Several peers as one tier: all are asked at once, one keeps each entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import StoreError, StoreFullError
from baton.store.interface import NO_TENANT, PutResult, ServerHealth, Usage
from baton.store.peer.owners import choose_owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.store.capacity import StoredEntry
    from baton.store.interface import Body, EntryLease, EntryName, TenantLabel
    from baton.store.promotion import PromotionPolicy
    from baton.store.remote.tier import RemoteTier


class PeersTier:
    """See `RemoteTier`: the same over several. Each peer has its own deadlines and breaker.

    Read: whichever peer has it, the same one for neighbours in a prompt where possible. Put: the
    peer that owns the name, of those that take entries and answer now.
    """

    def __init__(self, peers: Sequence[tuple[str, RemoteTier]], promotion: PromotionPolicy) -> None:
        """Take over one open tier for each URL."""
        self._promotion = promotion
        self._peers = tuple(peers)
        self._holders: dict[EntryName, RemoteTier] = {}
        """Of the names of the last `find`."""

    @property
    def places(self) -> Sequence[RemoteTier]:
        """See `HasPlaces`."""
        return [peer for _, peer in self._peers]

    def find(self, names: Sequence[EntryName]) -> int:
        found = self.find_each(names)
        return next((at for at, is_there in enumerate(found) if not is_there), len(names))

    def find_each(self, names: Sequence[EntryName]) -> Sequence[bool]:
        """See `RemoteLookup`. Peers that do not answer cost one wait, together."""
        started = [(peer, peer.begin_find(names)) for _, peer in self._peers]
        answers = [(peer, peer.end_find(find)) for peer, find in started]
        self._holders = {}
        last: RemoteTier | None = None
        for at, name in enumerate(names):
            holders = [peer for peer, found in answers if found[at]]
            if holders:
                last = last if last in holders else holders[0]
                self._holders[name] = last
        return [name in self._holders for name in names]

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        if self._is_known(name):
            return PutResult.EXISTS
        return self._find_owner(name).put(name, body, tenant)

    def put_behind(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        """See `WritesBehind`."""
        if self._is_known(name):
            return PutResult.EXISTS
        return self._find_owner(name).put_behind(name, body, tenant)

    def try_lease(self, name: EntryName) -> EntryLease | None:
        holder = self._holders.pop(name, None)
        lease = None if holder is None else holder.try_lease(name)
        if lease is not None:
            return lease
        holders = dict(self._holders)
        holder = self._find_holder(name)
        self._holders = holders
        return None if holder is None else holder.try_lease(name)

    def count_read(self, name: EntryName) -> bool:
        """See `DelaysPromotion`."""
        return self._promotion.count_read(name)

    def discard(self, name: EntryName) -> None:
        self._holders.pop(name, None)
        for _, peer in self._peers:
            peer.discard(name)

    def entries(self) -> list[StoredEntry]:
        """See `Tier`: of all peers; an entry that two of them have is there twice."""
        return [entry for _, peer in self._peers for entry in peer.entries()]

    def is_whole(self, name: EntryName) -> bool:
        holder = self._find_holder(name)
        if holder is None and not any(peer.is_available() for _, peer in self._peers):
            raise StoreError("peer: none of them answers; they are asked again later")
        return holder is not None and holder.is_whole(name)

    def usage(self) -> Usage:
        """See `Tier`: of all peers together. Available: all of them are."""
        usages = [peer.usage() for _, peer in self._peers]
        health = [usage.server for usage in usages if usage.server is not None]
        return Usage(
            used_bytes=sum(usage.used_bytes for usage in usages),
            capacity_bytes=sum(usage.capacity_bytes for usage in usages),
            num_demoted=0,
            num_dropped=sum(usage.num_dropped for usage in usages),
            num_damaged=sum(usage.num_damaged for usage in usages),
            server=ServerHealth(
                sum(each.num_failures for each in health),
                all(each.is_available for each in health),
            ),
        )

    def close(self) -> None:
        for _, peer in self._peers:
            peer.close()

    def _is_known(self, name: EntryName) -> bool:
        return any(peer.is_known(name) for _, peer in self._peers)

    def _find_owner(self, name: EntryName) -> RemoteTier:
        """The peer that is to keep an entry.

        Raises:
            StoreFullError: all are only read.
            StoreError: none that takes entries answers.
        """
        available = [(url, peer) for url, peer in self._peers if peer.is_available()]
        writable = [(url, peer) for url, peer in available if peer.server_report.takes_entries]
        owner = choose_owner(name, [url for url, _ in writable])
        if owner is not None:
            return writable[owner][1]
        if len(available) < len(self._peers):
            raise StoreError("peer: none that takes entries answers; it is asked again later")
        raise StoreFullError("peer: all are only read")

    def _find_holder(self, name: EntryName) -> RemoteTier | None:
        self.find_each((name,))
        return self._holders.get(name)
