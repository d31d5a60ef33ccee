"""How the `local` transports of one process reach each other, from thread to thread."""

from __future__ import annotations

import os
import secrets
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.transfer.transports.local.messages import LocalMessage

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
