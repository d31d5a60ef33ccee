"""Who may still store into which window: the receiver's book, pure.

The peer does the writing here, so a closed window is quiescent only once every writer that was told
of it has said that it stopped, or is proved unable to write: it has unmapped the memory, or its
process is dead. A broken connection proves nothing.

    open ── close_window ──► closing (waits for every writer that was told) ──► quiescent
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

from baton.errors import ProtocolError, TransferError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.transfer.interface import Window

WriterId = NewType("WriterId", int)
"""The receiver's name for one mapping of one region by one peer."""


@dataclass(slots=True)
class _Writer:
    epoch: Epoch
    region: RegionHandle
    told: set[TicketId] = field(default_factory=set)
    is_connected: bool = True


class WindowLedger:
    """Windows and the writers that were told of them. Owner thread: the transport's."""

    def __init__(self) -> None:
        self._open: dict[TicketId, Window] = {}
        self._closing: set[TicketId] = set()
        self._quiescent: list[TicketId] = []
        self._writers: dict[WriterId, _Writer] = {}

    @property
    def num_writers(self) -> int:
        """Writers that may still be able to store somewhere."""
        return len(self._writers)

    def add_writer(self, writer: WriterId, epoch: Epoch, region: RegionHandle) -> list[Window]:
        """A writer gets the memory; the open windows that it must be told of.

        A window that was closed before is not among them, so nothing can land in it.
        """
        added = self._writers[writer] = _Writer(epoch, region)
        windows = [window for window in self._open.values() if _concerns(window, added)]
        added.told.update(window.id for window in windows)
        return windows

    def open_window(self, window: Window) -> list[WriterId]:
        """Admit writes; the connected writers that must be told.

        Raises:
            TransferError: the id is open, or closed and not quiescent yet.
        """
        if window.id in self._open or window.id in self._closing:
            raise TransferError("this window is open already")
        self._open[window.id] = window
        writers = [
            writer
            for writer, state in self._writers.items()
            if state.is_connected and _concerns(window, state)
        ]
        for writer in writers:
            self._writers[writer].told.add(window.id)
        return writers

    def close_window(self, window: TicketId) -> list[WriterId]:
        """Admit no more; the connected writers that must be asked to stop. Unknown: none."""
        if self._open.pop(window, None) is None:
            return []
        self._closing.add(window)
        self._settle(window)
        return [
            writer
            for writer, state in self._writers.items()
            if state.is_connected and window in state.told
        ]

    def admits(self, writer: WriterId, window: TicketId) -> bool:
        """Whether a notice from this writer for this window counts."""
        state = self._writers.get(writer)
        return state is not None and window in state.told and window in self._open

    def pages_of(self, window: TicketId) -> NDArray[np.int64]:
        """The pages of a window that is open."""
        return self._open[window].pages

    def confirm_closed(self, writer: WriterId, window: TicketId) -> None:
        """The writer says that it stopped.

        Raises:
            ProtocolError: nobody asked it to.
        """
        state = self._writers[writer]
        if window not in self._closing or window not in state.told:
            raise ProtocolError("a writer closed a window that it was not asked to close")
        state.told.discard(window)
        self._settle(window)

    def disconnect(self, writer: WriterId) -> bool:
        """Its connection is gone, its mapping perhaps not; whether its death matters still."""
        state = self._writers.get(writer)
        if state is None:
            return False
        state.is_connected = False
        if not state.told:
            del self._writers[writer]
        return bool(state.told)

    def release(self, writer: WriterId) -> None:
        """It is proved that this writer can store nothing any more. Unknown ids are ignored."""
        state = self._writers.pop(writer, None)
        if state is not None:
            for window in state.told & self._closing:
                self._settle(window)

    def take_quiescent(self) -> list[TicketId]:
        """Windows that became quiescent since the last call, each once."""
        windows, self._quiescent = self._quiescent, []
        return windows

    def check_invariants(self) -> None:
        """Raise AssertionError if the book contradicts itself."""
        told = {window for state in self._writers.values() for window in state.told}
        if self._open.keys() & self._closing:
            raise AssertionError("a window is open and closing")
        if self._closing - told:
            raise AssertionError("a closing window waits for nobody")
        if told - self._closing - self._open.keys():
            raise AssertionError("a writer was told of a window that does not exist")
        if any(not (state.told or state.is_connected) for state in self._writers.values()):
            raise AssertionError("a writer that can do nothing is remembered")

    def _settle(self, window: TicketId) -> None:
        if not any(window in state.told for state in self._writers.values()):
            self._closing.discard(window)
            self._quiescent.append(window)


def _concerns(window: Window, writer: _Writer) -> bool:
    return window.region == writer.region and window.writer == writer.epoch
