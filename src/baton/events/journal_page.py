"""The answer to a gateway that asks for a journal's events (docs/wire/kv-events.md)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from baton.events.wire import encode_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.events.journal import CacheJournal

POLL_S: Final = 0.05
NUM_POLLS: Final = 20
NUM_POLLS_FOR_FEW: Final = 8
"""Few events wait so long for more: an engine that generates has some in each step, and each page
takes time of the worker's and the gateway's processors. Queued prompts do not wait."""
MAX_DIGITS: Final = 18
FEW_EVENTS: Final = 64
"""Are encoded in less time than another thread takes to begin."""


def read_event_number(text: str) -> int | None:
    """The number in a path's last part; None where it is none."""
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
        return None
    return int(text)


async def make_page(
    journal: CacheJournal, after: int, is_ending: Callable[[], bool] = lambda: False
) -> bytes:
    """What happened since event number `after`, encoded.

    Where that is nothing yet, it waits up to a second for it, or until `is_ending`; where that are
    few stored and removed blocks, for less time.
    """
    for num_polls in range(NUM_POLLS):
        is_few = 0 < after < journal.last <= after + FEW_EVENTS
        is_few = is_few and journal.last_expected <= after
        most = NUM_POLLS_FOR_FEW if is_few else NUM_POLLS if journal.last == after else 0
        if num_polls >= most or is_ending():
            break
        await asyncio.sleep(POLL_S)
    if after <= journal.last <= after + FEW_EVENTS:
        return encode_page(journal.read(after))
    # All that a large pool holds takes a tenth of a second: not of the answers' thread.
    return await asyncio.to_thread(lambda: encode_page(journal.read(after)))
