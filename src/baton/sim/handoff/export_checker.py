"""Blocks that peers attend over, as an onlooker sees them: I2 of exported blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.handoff.interface import ExportReleased, ImportRevoked, KVExported
from baton.sim.handoff import internals
from baton.sim.handoff.violation import ViolationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.handoff.interface import HandoffEvent
    from baton.sim.handoff.process import SimProcess

_NAMES: Final = {KVExported: "loan", ExportReleased: "loan ended", ImportRevoked: "loan recalled"}


@dataclass(slots=True)
class ExportChecker:
    """All exports of a run. `seen` counts what happened to them."""

    seen: Counter[str] = field(default_factory=Counter)

    def on_event(self, process: SimProcess, event: HandoffEvent) -> None:
        """An export ends only when no process reads it any more, whatever was reported."""
        if isinstance(event, KVExported | ExportReleased | ImportRevoked):
            self.seen[_NAMES[type(event)]] += 1
        if isinstance(event, ExportReleased):
            for other in _others(process):
                if internals.is_importing(other, event.ticket):
                    name = event.ticket.hex()[:6]
                    raise ViolationError(
                        "I2", f"{process.name}: export {name} ends, and {other.name} reads"
                    )

    def on_write(self, process: SimProcess, blocks: Iterable[int]) -> None:
        """Bytes are about to change in blocks of a worker's own."""
        changed = set(blocks)
        if not process.world.schedule.shares_blocks or not changed:
            return
        if max(changed) >= process.plan.num_blocks:
            raise ViolationError("I2", f"{process.name}: it writes into blocks of a peer")
        for other in _others(process):
            if changed & internals.find_read_pages(other, process.epoch):
                raise ViolationError(
                    "I2", f"{process.name}: blocks change that {other.name} attends over"
                )

    def on_copy(self, process: SimProcess, source: Iterable[int], target: Iterable[int]) -> None:
        """Blocks that were imported are copied into others."""
        self.seen["loan copied"] += 1
        self.on_read(process, source)
        self.on_write(process, target)

    def on_read(self, process: SimProcess, blocks: Iterable[int]) -> None:
        """Blocks are looked at: own ones, or mapped ones."""
        if process.world.schedule.shares_blocks:
            block = internals.find_unmapped(process, blocks)
            if block is not None:
                raise ViolationError(
                    "I2", f"{process.name}: block {block} is read, and mapped no more"
                )


def _others(process: SimProcess) -> list[SimProcess]:
    """Who may read a worker's blocks: lives that have not ended, stopped ones too."""
    return [each for each in process.world.processes if each.is_alive and each is not process]
