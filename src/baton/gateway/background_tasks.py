"""What a gateway still has to do for a request that has ended: telling workers, mostly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine


class BackgroundTasks:
    """Tasks that nobody waits for. Owner: the event loop's thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, coroutine: Coroutine[None, None, None]) -> None:
        """Begin one; it handles its own failures."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End what is not done."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
