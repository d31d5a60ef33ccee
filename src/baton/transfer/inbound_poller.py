"""Hear what a peer said by now, in the middle of a call of the owner's."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.transfer.connection import Connection


class InboundPoller:
    """On one connection. To ask is one cheap system call, where to read in vain is a dear one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.channel.socket, select.POLLIN)

    def poll_inbound(self) -> None:
        """Take one step if the peer said something, or is gone."""
        if self._connection.is_open and self._poll.poll(0):
            self._connection.step()
