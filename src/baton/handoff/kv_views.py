"""KV views: how one worker shows its KV to peers.

An engine whose pages only its own kind can read (`KVLayout.order` "opaque") has a second view for
everybody else: pages in canonical order, in staging memory of its own. Two workers use the first
pair of views, in the dialer's order of preference, between which KV can be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout
    from baton.transfer.interface import PagedRegion
    from baton.transfer.peer_mappings import PeerMappings


class Staging(Protocol):
    """Copies whole pages between an engine's own blocks and a view's region, converting them.

    Called on the agent's thread, while the engine may compute in other blocks. Both index arrays
    are int64 `[n]`: engine block `blocks[i]` corresponds to page `staged[i]` of the view's region.
    A view with staging has the engine's block size, and orders that use it start at a block's
    first token.
    """

    def gather(self, layer: int, blocks: NDArray[np.int64], staged: NDArray[np.int64]) -> None:
        """Engine's blocks → staged pages, of one layer of the view."""
        ...

    def scatter(self, layer: int, staged: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """Staged pages → engine's blocks, of one layer of the view."""
        ...


@dataclass(frozen=True, slots=True)
class KVView:
    """One KV view. Without `staging`, an order's blocks are pages of `region` themselves.

    With `peer_mappings` its engine exports blocks, and attends over imported ones (`reference`).
    """

    layout: KVLayout
    region: PagedRegion
    staging: Staging | None = None
    peer_mappings: PeerMappings | None = None
