"""How the `local` transports of one process reach each other, from thread to thread."""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials
    from baton.errors import TransferError
    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.kv.copies import PageCopies
    from baton.transfer.interface import PageArray, PagedRegion, TransferId


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
    """Dialer: this incarnation of a worker wants to reach this region."""

    link: LocalLink
    credentials: Credentials
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


_mailboxes: Final[dict[str, Mailbox]] = {}
_lock: Final = threading.Lock()


class Mailbox:
    """One transport's letters, unread. Any thread of this process may post."""

    def __init__(self) -> None:
        self.name = f"local-{secrets.token_hex(16)}"
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while there are letters; the owner's to wait on."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._messages: list[LocalMessage] = []
        self._is_open = True
        with _lock:
            _mailboxes[self.name] = self

    @property
    def is_here(self) -> bool:
        """Whether this is the process that reads it: a fork has a copy that no process reads."""
        return self._process == os.getpid()

    def post(self, message: LocalMessage) -> bool:
        """Leave a letter; False if the owner is gone."""
        with self._lock:
            if not self._is_open:
                return False
            if not self._messages:
                os.eventfd_write(self.fd, 1)
            self._messages.append(message)
            return True

    def take(self) -> list[LocalMessage]:
        """All letters, in the order of posting."""
        with self._lock:
            if not self._messages:
                return []
            os.eventfd_read(self.fd)
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Take no more; idempotent. Unread letters are dropped."""
        with _lock:
            _mailboxes.pop(self.name, None)
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._messages = []
                os.close(self.fd)


def find_mailbox(name: str) -> Mailbox | None:
    """An open mailbox of this process."""
    with _lock:
        found = _mailboxes.get(name)
    return found if found is not None and found.is_here else None
