"""A lease of a value that a server has sent: checked while it is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.store.entry_format import BodyCheck, EntryHeader
    from baton.store.interface import TenantLabel

PIECE_BYTES: Final = 128 << 10


class ValueLease:
    """See `EntryLease`: the bytes are this process's own already."""

    def __init__(
        self,
        body: memoryview,
        header: EntryHeader,
        check: BodyCheck,
        on_damage: Callable[[], None],
    ) -> None:
        self._body, self._digest_check, self._on_damage = body, check, on_damage
        self.header = header
        self._is_right: bool | None = None

    @property
    def num_bytes(self) -> int:
        return len(self._body)

    @property
    def tenant(self) -> TenantLabel:
        return self.header.tenant

    def report_damage(self) -> None:
        """See `StoredLease`."""
        self._on_damage()

    def try_read(self, into: memoryview) -> bool:
        if len(into) != len(self._body):
            raise ValueError(f"{len(into)} bytes for a body of {len(self._body)}")
        if self._is_right is None:
            self._is_right = self._copy_and_check(into)
            if not self._is_right:
                self._on_damage()
        else:
            into[:] = self._body
        return self._is_right

    def release(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _copy_and_check(self, into: memoryview) -> bool:
        """Piece by piece, while each is in the processor's cache."""
        for at in range(0, len(self._body), PIECE_BYTES):
            piece = self._body[at : at + PIECE_BYTES]
            self._digest_check.add(piece)
            into[at : at + len(piece)] = piece
        return self._digest_check.is_passed()
