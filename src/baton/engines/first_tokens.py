"""First tokens that were said: by this engine to its worker, or to the client by prefill's.

Where the client gets the first token from the prefill worker while KV is still on its way, the
decode worker must go on from that token, even if it computes the prompt itself and would have
sampled another one. Whoever says a token of a ticket first is right.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.handoff.interface import SampledToken
    from baton.ids import TicketId

MAX_REMEMBERED: Final = 4096


class FirstTokens:
    """The oldest are forgotten first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: OrderedDict[TicketId, SampledToken] = OrderedDict()

    def commit(self, ticket: TicketId, token: SampledToken) -> SampledToken:
        """The token that counts: the first that was said of this ticket."""
        with self._lock:
            committed = self._tokens.setdefault(ticket, token)
            while len(self._tokens) > MAX_REMEMBERED:
                self._tokens.popitem(last=False)
            return committed
