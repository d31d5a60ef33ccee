"""A prefill worker in a process of its own, which a test can kill."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from tests.integration.handoff_nodes import node
from tests.unit.handoff.orders import send_order

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def run_prefill(secret: bytes, pipe: Connection) -> None:
    """Say where it is, hear of one ticket, offer half of its KV, and never finish."""
    with node("p", kinds=("shared",), key=Credentials.of(ClusterKey(secret))) as prefill:
        pipe.send(prefill.ref)
        ticket = pipe.recv()
        prefill.agent.start_send(send_order(ticket, num_tokens=101, num_ready_tokens=50))
        threading.Event().wait()
