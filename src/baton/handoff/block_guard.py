"""An engine's blocks in an order to the store, until the engine takes them back."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Self

from baton.errors import StoreError


@dataclass(slots=True, eq=False)
class BlockGuard:
    """Entered while the blocks of an order are read or written; thread-safe.

    Files and networks are accessed outside it, so that `revoke` waits for a copy in memory at most,
    whatever the store does.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_revoked: bool = False

    @property
    def is_revoked(self) -> bool:
        """Whether the blocks are the engine's again."""
        return self._is_revoked

    def revoke(self) -> None:
        """When this returns, the order's blocks are accessed no more."""
        with self._lock:
            self._is_revoked = True

    def __enter__(self) -> Self:
        """Raises StoreError where the blocks are the engine's again."""
        self._lock.acquire()
        if self._is_revoked:
            self._lock.release()
            raise StoreError(
                "the engine has taken back its blocks: it needed them, or waited too long"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
