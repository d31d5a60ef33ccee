"""What carried one handoff, and what should have: for its trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.telemetry.trace import RequestSpan
    from baton.transfer.links.choice import Choice


REFERENCE: Final = "reference"
"""In place of a transport, in traces of handoffs in which nothing moved."""


@dataclass(slots=True)
class TransportUsage:
    """Bytes by transport. A transfer over another one than expected is never lost in the sum."""

    _bytes: Counter[str] = field(default_factory=Counter)
    _mismatch: tuple[str, str] | None = None

    def record_choice(self, choice: Choice) -> None:
        """One transfer, as it was chosen."""
        self._bytes[choice.used] += choice.shape.num_bytes
        if choice.is_mismatch and self._mismatch is None:
            self._mismatch = choice.expected, choice.used

    def add_bytes(self, transport: str, num_bytes: int) -> None:
        """One transfer that the peer chose."""
        self._bytes[transport] += num_bytes

    def record_failover(self, expected: str, used: str) -> None:
        """A transport failed, and another one went on."""
        self._mismatch = self._mismatch or (expected, used)

    def write_into(self, trace: RequestSpan) -> None:
        """The pair that the trace shows: a mismatch if there was one, else what carried most."""
        if self._mismatch is not None:
            trace.expected_transport, trace.transport = self._mismatch
        elif self._bytes:
            ((most, _),) = self._bytes.most_common(1)
            trace.expected_transport = trace.transport = most
