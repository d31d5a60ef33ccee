"""A child of the launcher that is killed while a process of its own lives and holds its pipes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from baton.launch.child import ChildExited, spawn

LEAVES_ONE_BEHIND = """
import os, subprocess, sys, time
other = subprocess.Popen(["sleep", "600"], process_group=0)  # as vLLM's engine, while it loads
print(other.pid, flush=True)
time.sleep(600)
"""
WITHIN_S = 30.0


@pytest.mark.parametrize("by", ["a stranger", "the launcher"])
def test_its_end_is_noticed_and_nothing_of_it_is_left(by: str) -> None:
    async def scenario() -> None:
        lines: asyncio.Queue[str] = asyncio.Queue()
        command = (sys.executable, "-c", LEAVES_ONE_BEHIND)
        child = await spawn("worker", command, os.environ, lines.put_nowait)
        other = int(await lines.get())
        assert os.getpgid(other) != child.pid, "a group of its own"
        async with asyncio.timeout(WITHIN_S):
            if by == "a stranger":
                os.kill(child.pid, signal.SIGKILL)
            else:
                child.kill()
            assert await child.wait_until_exited() == ChildExited(-signal.SIGKILL)
            while is_alive(other):
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError(24, "no fds")])
def test_a_process_that_cannot_be_watched_is_ended(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """asyncio asks for a thread or a descriptor once it exists: there may be none."""
    pids = []

    def refuse(_: object, pid: int, *args: object) -> None:
        pids.append(pid)
        raise error

    for name in ("ThreadedChildWatcher", "PidfdChildWatcher", "_ThreadedChildWatcher"):
        watcher = getattr(asyncio.unix_events, name, None)
        if watcher is not None:
            monkeypatch.setattr(watcher, "add_child_handler", refuse)

    async def scenario() -> None:
        command = (sys.executable, "-c", "import time; time.sleep(60)")
        with pytest.raises(type(error), match=str(error.args[-1])):
            await spawn("worker", command, os.environ, lambda _: None)

    asyncio.run(scenario())
    (pid,) = pids
    assert not Path(f"/proc/{pid}").exists(), "it was ended and waited for"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
