"""Messages between `local` transports. The dialer asked for a region; the owner has it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey
    from baton.errors import TransferError
    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.kv.copies import PageCopies
    from baton.transfer.interface import PageArray, PagedRegion, TransferId
    from baton.transfer.transports.local.mailbox import Mailbox


@dataclass(eq=False, slots=True)
class LocalLink:
    """One dialer's way to one region.

    The owner holds `lock` while it copies from or to the dialer's memory, and does so only while
    `is_over` is False: who sets it under the lock knows that its memory is left alone.
    """

    dialer: Mailbox
    owner: Mailbox
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Attach:
    """Dialer: this life of a worker wants to reach this region."""

    link: LocalLink
    key: ClusterKey
    epoch: Epoch
    region: RegionHandle


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Dialer: copy these pages of `source` into the region, then take the notification."""

    link: LocalLink
    transfer: TransferId
    grant: TicketId
    copies: PageCopies
    source: PagedRegion
    notification: bytes


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Dialer: copy these pages of the region into `target`."""

    link: LocalLink
    transfer: TransferId
    copies: PageCopies
    target: PagedRegion


@dataclass(frozen=True, slots=True)
class Detached:
    """Dialer: it asks for nothing any more."""

    link: LocalLink


@dataclass(frozen=True, slots=True)
class Attached:
    """Owner: ask away; the region's arrays, to compare with the description.

    `memory` is the region's, read-only: it outlives the owner, who may release its own any time.
    """

    link: LocalLink
    arrays: tuple[PageArray, ...]
    memory: memoryview


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Owner: a transfer is over, by success if there is no error."""

    link: LocalLink
    transfer: TransferId
    error: TransferError | None


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """Owner: the region cannot be reached, or not any more."""

    link: LocalLink
    error: TransferError


LocalMessage: TypeAlias = (
    Attach | WriteRequest | ReadRequest | Detached | Attached | TransferDone | LinkEnded
)
