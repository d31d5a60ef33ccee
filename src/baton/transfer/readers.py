"""Who reads this worker's pages in place, and what proves that it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from baton.ids import Epoch


@runtime_checkable
class TracksReaders(Protocol):
    """A transport that knows the processes which mapped its regions (`Capabilities.views`)."""

    def open_reader(self, reader: Epoch) -> int | None:
        """A descriptor that becomes readable when that process has ended, with its mappings.

        Of the worker of that life, if it is attached now; None where it is not, or where the
        kernel cannot tell. The caller closes it; it outlives the connection.
        """
        ...
