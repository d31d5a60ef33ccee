"""One transfer as a session knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.transfer.interface import TransferId


@dataclass(frozen=True, slots=True, order=True)
class TransferHandle:
    """A transfer's id is its transport's own: two transports give the same ones."""

    transport: str
    transfer: TransferId
