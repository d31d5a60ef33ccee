"""A transport between regions of one thread: the smallest that passes the contract."""

from __future__ import annotations

import hmac
import logging
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.kv.copies import apply_copies
from baton.registry import Plugin
from baton.transfer.grants import PageSet, check_grant_pages
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    GrantQuiescent,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransferId,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import check_arrays, check_copies, check_notification, view_pages

if TYPE_CHECKING:
    from baton.transfer.interface import TransportContext

_log = logging.getLogger(__name__)
_open: dict[str, LoopbackTransport] = {}


class LoopbackOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Set by `[transfer.options.loopback]`, or `--set transfer.options.loopback.…`."""

    connect_timeout_s: float = 5.0


class LoopbackTransport:
    """See `Transport`. Nothing is posted to hardware: a closed grant is quiescent at once."""

    kind = "loopback"
    capabilities = Capabilities(
        memory=("host", "shared"), same_host_only=True, same_process_only=True
    )
    readiness_fd = None  # the agent polls it on a timer

    def __init__(self, options: LoopbackOptions, context: TransportContext) -> None:
        self._options, self.context = options, context
        self._name = f"loopback-{secrets.token_hex(8)}"
        self.regions: dict[Any, Any] = {}
        self.grants: dict[Any, Any] = {}
        self.events: list[Any] = []
        self.requests: list[tuple[LoopbackTransport, RemoteId, RegionDescriptor]] = []
        self._remotes: dict[RemoteId, tuple[str, RegionDescriptor, Any]] = {}
        self._next_id = 0
        _open[self._name] = self

    def expose(self, region):
        if region.kind not in self.capabilities.memory:
            raise TransferError(f"loopback cannot expose {region.kind} memory")
        check_arrays(region.arrays)
        self.regions[region.handle] = region
        epoch = self.context.epoch
        return RegionDescriptor(self.kind, region.handle, epoch, region.arrays, self._name)

    def attach(self, descriptor):
        if descriptor.transport != self.kind or not descriptor.endpoint.startswith("loopback-"):
            raise TransferError("not a descriptor of the loopback transport")
        check_arrays(descriptor.arrays)
        self._next_id += 1
        id_ = RemoteId(self._next_id)
        deadline = self.context.clock.now() + self._options.connect_timeout_s
        self._remotes[id_] = ("attaching", descriptor, deadline)
        owner = _open.get(descriptor.endpoint)
        if owner is None:
            self.lose(id_, PeerUnreachableError("the region is not in this process"))
        else:
            owner.requests.append((self, id_, descriptor))
        return id_

    def detach(self, remote):
        self._remotes.pop(remote, None)

    def open_grant(self, grant):
        if grant.id in self.grants:
            raise TransferError("this grant is open already")
        check_grant_pages(grant.pages, self._find_region(grant.region).arrays)
        self.grants[grant.id] = (grant, PageSet(grant.pages))

    def close_grant(self, grant):
        if self.grants.pop(grant, None) is not None:
            late = [e for e in self.events if isinstance(e, Arrived) and e.grant == grant]
            self.events = [e for e in self.events if e not in late]
            self.events.append(GrantQuiescent(grant))

    def finish_grant(self, grant):
        self.grants.pop(grant, None)
        return True  # a write is in place before `submit` returns: none can come late

    def submit(self, write):
        state, descriptor, _ = self._remotes.get(write.remote, ("", None, None))
        if state not in {"attached", "lost"}:
            raise TransferError("this remote is not attached")
        region = self._find_region(write.region)
        check_copies(write.copies, region.arrays, descriptor.arrays)
        check_notification(write.notification)
        self._next_id += 1
        transfer, owner = TransferId(self._next_id), _open.get(descriptor.endpoint)
        try:
            if owner is None or state == "lost":
                raise PeerLostError("the peer closed its end")
            owner.receive(write, region, self.context.epoch, descriptor.handle)
        except TransferError as error:
            self.events.append(WriteFailed(transfer, error))
        else:
            self.events.append(WriteCompleted(transfer, write.copies.num_bytes))
        return transfer

    def receive(self, write, source, writer, handle):
        """The owner's half of a write: permission, bytes, then the notification."""
        grant, pages = self.grants.get(write.grant, (None, None))
        if grant is None or (grant.writer, grant.region) != (writer, handle):
            raise TransferError("no such grant for this writer")
        if not all(pages.covers(group.dst_pages) for group in write.copies.groups):
            raise TransferError("a page is outside the grant")
        target, array = self.regions[handle], write.copies.layer
        views = [view_pages(region.memory, region.arrays[array]) for region in (source, target)]
        apply_copies(write.copies, *views)
        self.events.append(Arrived(write.grant, write.notification))

    def poll(self):
        for dialer, id_, descriptor in self.requests:
            dialer.admitted(id_, self._why_not(dialer, descriptor))
        self.requests.clear()
        for id_, (state, descriptor, deadline) in list(self._remotes.items()):
            if state == "attaching" and self.context.clock.now() >= deadline:
                self.lose(id_, PeerUnreachableError("no answer in time"))
            elif state == "attached" and descriptor.endpoint not in _open:
                self.lose(id_, PeerLostError("the peer closed its end"))
        events, self.events = self.events, []
        return events

    def close(self):
        _open.pop(self._name, None)
        self.events, self.requests, self._remotes = [], [], {}

    def admitted(self, id_, error):
        """The owner's answer to `attach`."""
        if self._remotes.get(id_, ("", None, None))[0] != "attaching":
            return
        if error is not None:
            self.lose(id_, error)
            return
        self._remotes[id_] = ("attached", self._remotes[id_][1], None)
        self.events.append(RemoteAttached(id_))

    def lose(self, id_, error):
        """A remote is lost, once."""
        self._remotes[id_] = ("lost", self._remotes[id_][1], None)
        self.events.append(RemoteLost(id_, error))

    def _why_not(self, dialer, descriptor):
        theirs, ours = (side.context.credentials.key.secret for side in (dialer, self))
        if not hmac.compare_digest(theirs, ours):
            _log.warning("refused a transport with another cluster key")
            return TransferError("the peer has another cluster key")
        region = self.regions.get(descriptor.handle)
        if region is None or region.arrays != descriptor.arrays:
            return TransferError("the peer has no such region")
        return None

    def _find_region(self, handle):
        if handle not in self.regions:
            raise TransferError("this region was not exposed")
        return self.regions[handle]


PLUGIN = Plugin(LoopbackOptions, lambda options: lambda ctx: LoopbackTransport(options, ctx))
