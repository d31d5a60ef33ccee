"""Which of several peers keeps an entry: rendezvous hashing. Pure.

D. Thaler, C. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998. A peer that is
added or lost moves the entries of that peer only. Readers ask all peers, so workers that disagree
about the list of peers still find everything.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.store.interface import EntryName


def choose_owner(name: EntryName, urls: Sequence[str]) -> int | None:
    """The index of the URL whose peer keeps the entry; None where there is none.

    The order of the URLs does not matter.
    """
    if not urls:
        return None
    return max(range(len(urls)), key=lambda at: (_weigh(name, urls[at]), urls[at]))


def _weigh(name: EntryName, url: str) -> bytes:
    return hashlib.sha256(name + url.encode()).digest()
