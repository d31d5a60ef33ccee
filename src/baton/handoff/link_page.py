"""The page on which a worker shows what its links to peers cost (docs/wire/worker-http.md)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from baton.protocol.worker_http import MAX_LINKS, MeasuredLink, MeasuredLinks

if TYPE_CHECKING:
    from baton.handoff.agent import HandoffAgent

ANSWER_TIMEOUT_S: Final = 1.0


async def describe_links(agent: HandoffAgent) -> MeasuredLinks:
    """Those that were measured; none where the agent's thread does not answer in time."""
    try:
        reports = await asyncio.wait_for(
            asyncio.wrap_future(agent.describe_links()), ANSWER_TIMEOUT_S
        )
    except TimeoutError:
        reports = []
    return MeasuredLinks(
        tuple(
            MeasuredLink(
                each.peer,
                each.direction,
                each.transport,
                each.latency_s,
                each.byte_s,
                each.model.num_probes,
                each.model.num_transfers,
                each.encoding,
                each.kv_byte_s,
            )
            for each in reports[-MAX_LINKS:]
        )
    )
