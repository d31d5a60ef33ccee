"""What a worker takes part in mode pool with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.pooling.tally import EntryTally

if TYPE_CHECKING:
    from baton.handoff.faces import Face
    from baton.store.form import EntryForm
    from baton.store.tiered import TieredStore


@dataclass(frozen=True, slots=True)
class Pool:
    """The store belongs to the pool's thread, which closes it; so do the staging pages of `face`.

    The face shows the engine's blocks in an order that can be divided into tokens and heads.
    """

    store: TieredStore
    form: EntryForm
    face: Face
    tally: EntryTally = field(default_factory=EntryTally)
