"""Bugs to plant where KV goes through the store: see `planted.py`."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from baton.clock import Instant
from baton.engines.transformers.pinned_blocks import KeptBlocks
from baton.handoff.dispatcher import HandoffDispatcher
from baton.handoff.interface import KVLanded, PrefixFound
from baton.handoff.pool_mode import block_copier, store_handoff
from baton.handoff.pool_mode.prefix_store import StoredPrefixes
from baton.handoff.pool_mode.store_handoff import StoreHandoff
from baton.handoff.pool_mode.store_reader import StoreRead
from baton.handoff.pool_mode.store_writer import StoreWrite
from baton.kv.identity import BlockHash
from baton.store import entry_format

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def rot_is_believed(patch: pytest.MonkeyPatch) -> None:
    """What is in the store is taken for what was put."""
    patch.setattr(entry_format, "has_digest", lambda *_: True)


def tails_without_tokens(patch: pytest.MonkeyPatch) -> None:
    """The end of a prompt is named by what precedes it, and its length."""

    def name_tail(domain, token_ids, parent):
        return BlockHash(hashlib.sha256((parent or b"") + bytes([len(token_ids)])).digest()[:16])

    patch.setattr(block_copier, "compute_tail_hash", name_tail)


def kept_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    """One layer is taken for all."""

    def layer_ready(self, layer, stop, after):
        self._ready[:] = stop

    patch.setattr(StoreWrite, "mark_layer_ready", layer_ready)


def part_is_taken_for_all(patch: pytest.MonkeyPatch) -> None:
    """What did not come is not computed."""
    patch.setattr(
        StoreRead,
        "end_early",
        lambda self, reason, stage: [KVLanded(self.order.ticket.id, None)],
    )


def collections_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Entries that do not come are waited for."""
    patch.setattr(StoreHandoff, "_deadline", lambda self, order: Instant(math.inf))
    patch.setattr(store_handoff, "MAX_SILENCE_S", math.inf)


def silent_abort(patch: pytest.MonkeyPatch) -> None:
    """The engine does not hear that its blocks are let go of."""

    def abort(self, ticket, reason):
        self._reads.pop(ticket, None)
        self._fail_write(ticket, reason, "abort")

    patch.setattr(StoreHandoff, "_abort", abort)


def pooled_tickets_are_renewed(patch: pytest.MonkeyPatch) -> None:
    """Decode renews what nobody holds, for ever."""

    def renew_lease(self, ticket):
        self.agent.renew_lease(ticket)

    patch.setattr(HandoffDispatcher, "renew_lease", renew_lease)


def kept_blocks_are_freed_early(patch: pytest.MonkeyPatch) -> None:
    """What is being copied into the store is free for other requests."""
    hold = KeptBlocks.hold

    def hold_not(self, sequence, unit):
        order = hold(self, sequence, unit)
        if order is not None:
            self._free(self._kept[order.id])
        return order

    patch.setattr(KeptBlocks, "hold", hold_not)


def load_is_taken_for_whole(patch: pytest.MonkeyPatch) -> None:
    """What the store does not have of a prompt is not computed."""

    def end_load(self, load):
        del self._loads[load.order.id]
        self._emit(KVLanded(load.order.id, None, len(load.order.prompt_ids)))

    def answer_lookup(self, order, asked_at):
        self._emit(PrefixFound(order.id, len(order.prompt_ids)))

    patch.setattr(StoredPrefixes, "_end_load", end_load)
    patch.setattr(StoredPrefixes, "_answer_lookup", answer_lookup)


PLANTED_IN_POOL: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    plant.__name__: plant
    for plant in (
        rot_is_believed,
        tails_without_tokens,
        kept_before_it_is_computed,
        part_is_taken_for_all,
        collections_for_ever,
        silent_abort,
        pooled_tickets_are_renewed,
        kept_blocks_are_freed_early,
        load_is_taken_for_whole,
    )
}
