"""Bugs to plant where blocks are lent: see `planted.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engines.transformers.pinned_blocks import SharedBlocks
from baton.handoff.grants import incarnation_of_peer
from baton.handoff.reference.exports import ExportTable, SharedBlockExporter
from baton.handoff.reference.imports import ImportTable

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def loans_end_with_links(patch: pytest.MonkeyPatch) -> None:
    """A broken link is taken for the borrower's end."""

    def peer_gone(self, peer):
        importer = incarnation_of_peer(peer)
        if importer is not None:
            self._end(self.table.importer_died(importer))

    patch.setattr(SharedBlockExporter, "peer_gone", peer_gone)


def loans_end_by_time(patch: pytest.MonkeyPatch) -> None:
    """What was asked back is taken back."""
    ask = SharedBlockExporter._send_revokes

    def ask_and_take(self, due):
        ask(self, due)
        self._end([self.table._close(ticket) for tickets in due.values() for ticket in tickets])

    patch.setattr(SharedBlockExporter, "_send_revokes", ask_and_take)


def borrowers_live_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a borrower's process is there."""
    patch.setattr(SharedBlockExporter, "_find_dead_importers", lambda self: [])


def returns_are_said_once(patch: pytest.MonkeyPatch) -> None:
    """What was said over a link that broke is taken for heard."""
    patch.setattr(ImportTable, "link_lost", lambda self, exporter: None)


def given_back_early(patch: pytest.MonkeyPatch) -> None:
    """The engine gives back what it goes on to read."""
    borrow = SharedBlocks.import_blocks

    def borrow_and_give_back(self, ticket, sequence):
        borrow(self, ticket, sequence)
        self._pending_releases.append(ticket)

    patch.setattr(SharedBlocks, "import_blocks", borrow_and_give_back)


def lent_blocks_are_free(patch: pytest.MonkeyPatch) -> None:
    """The lender's engine does not set lent blocks aside."""
    patch.setattr(SharedBlocks, "export_blocks", lambda self, ticket, sequence, blocks: None)


def unmapped_in_use(patch: pytest.MonkeyPatch) -> None:
    """With its link a lender's memory goes."""
    patch.setattr(ImportTable, "holds", lambda self, exporter: False)


def refused_and_lent(patch: pytest.MonkeyPatch) -> None:
    """A loan that was refused is made when another route appears."""
    patch.setattr(SharedBlockExporter, "is_reserved", lambda self, ticket: True)


def any_borrower_returns(patch: pytest.MonkeyPatch) -> None:
    """Whoever says that a loan is over is believed."""
    patch.setattr(
        ExportTable, "_is_exported_to", lambda self, importer, ticket: ticket in self._exports
    )


PLANTED_IN_EXPORTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    plant.__name__: plant
    for plant in (
        loans_end_with_links,
        loans_end_by_time,
        borrowers_live_for_ever,
        returns_are_said_once,
        given_back_early,
        lent_blocks_are_free,
        unmapped_in_use,
        refused_and_lent,
        any_borrower_returns,
    )
}
