"""One transport, tried for real: two processes, scattered pages, every byte verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.rig.backend import BackendSpec
from baton.rig.nodes import LocalNodes
from baton.rig.pages import PAGE_BYTES, Workload
from baton.rig.pair import NodePair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.clock import Clock

NUM_PAGES: Final = 64
WORKLOAD: Final = Workload("scattered", 48 * PAGE_BYTES)
REPLY_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class TransferCheckResult:
    """What a trial showed: pages were written, and read back where the transport reads.

    `listeners`: sockets outside loopback that the transport's library opened.
    """

    num_bytes: int
    was_read: bool
    listeners: tuple[str, ...]


def run_transport_check(
    kind: str, options: Mapping[str, object], clock: Clock
) -> TransferCheckResult:
    """Move pages by one transport between two processes, and end the grant of the writes.

    Raises:
        UnsupportedError: it moves no memory that could be tried.
        WrongBytesError: other bytes arrived, or other pages changed.
        TransferError: the transport does not work here; the reason is the transport's.
    """
    spec = BackendSpec("transport", kind, options)
    with NodePair(spec, NUM_PAGES, LocalNodes(clock), reply_timeout_s=REPLY_TIMEOUT_S) as pair:
        pair.verify(WORKLOAD, "push", also_rest=True)
        reads = "pull" in pair.traits.directions
        if reads:
            pair.verify(WORKLOAD, "pull", also_rest=True)
        pair.call("owner", "close_grant", peer_serves=True)
        replies = [pair.call(role, "listeners") for role in ("driver", "owner")]
    listeners = {each for reply in replies for each in msgspec.json.decode(reply, type=list[str])}
    return TransferCheckResult(WORKLOAD.num_bytes, reads, tuple(sorted(listeners)))
