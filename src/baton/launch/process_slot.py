"""One position in a launch: the process that holds it now, and how the next one would start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton.launch.plan import Ports

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.launch.child import Child
    from baton.launch.restarts import RestartBudget
    from baton.telemetry.process_status import Ready


@dataclass(slots=True)
class ProcessSlot:
    """Owned by the launcher's event loop.

    `command` gives the command line on given ports: 0 at first, then those that the first life
    announced, so that its peers find the next one where it was.
    """

    name: str
    command: Callable[[Ports], tuple[str, ...]]
    child: Child
    budget: RestartBudget
    ports: Ports = field(default_factory=Ports)

    def record_ports(self, ready: Ready) -> None:
        """Keep the ports that this life got for the lives to come."""
        handoff = ready.handoff_address or ":0"
        self.ports = Ports(urlsplit(ready.url).port or 0, int(handoff.rpartition(":")[2]))
