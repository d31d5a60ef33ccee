"""The reactor of a transport."""

from __future__ import annotations

from typing import TypeAlias

from baton.net.reactor import EventReactor
from baton.transfer.interface import TransferEvent

Reactor: TypeAlias = EventReactor[TransferEvent]
