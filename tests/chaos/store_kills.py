"""Eight processes use one full store, and one after the other is killed: `make store-kills`.

Each puts, reads, evicts and maintains at random; what it reads must be what was put. After each
kill every entry is read and compared with its digest, beside the processes that go on.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import StoreError
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.ops import store as ops
from baton.store.folder.bodies import compute_cost
from baton.store.folder.tier import COUNT_TOLERANCE_PARTS
from baton.testing.store_contract import body_of, name_of, read

if TYPE_CHECKING:
    from baton.store.tiered import TieredStore

KEY = "5" * 64
NUM_PROCESSES = 8
NUM_CONTENTS = 128
BODY_BYTES = 100_000
NUM_ENTRIES = 64
CAPACITY_BYTES = NUM_ENTRIES * compute_cost(BODY_BYTES)
MAX_LIFE_S = 0.05
WRONG, BROKEN = 3, 4


@dataclass(slots=True)
class Kills:
    """What was seen; `num_mid_write`: processes that were killed with an entry half written."""

    num_kills: int = 0
    num_mid_write: int = 0
    max_used_bytes: int = 0


def options(folder: Path, eviction: str) -> dict[str, object]:
    return {"directory": str(folder), "capacity_bytes": CAPACITY_BYTES, "eviction": eviction}


def open_files(folder: Path, eviction: str) -> TieredStore:
    key = ClusterKey.from_hex(KEY)
    settings = {"file": options(folder, eviction)}
    return open_keyed_store(("file",), settings, key=key, clock=MachineClock())


def use(folder: Path, eviction: str, seed: int) -> None:
    """One process, until it is killed. Exits with WRONG for a wrong answer."""
    chance = random.Random(seed)
    (tier,) = open_files(folder, eviction).tiers
    while True:
        content = f"entry {chance.randrange(NUM_CONTENTS)}"
        found = read(tier, content)
        if found not in {None, body_of(content, BODY_BYTES)}:
            os._exit(WRONG)
        with suppress(StoreError):  # others take what is freed, or hold the lock
            if found is None:
                tier.put(name_of(content), body_of(content, BODY_BYTES))
            if chance.random() < 0.05:
                tier.discard(name_of(content))
            if chance.random() < 0.02:
                tier.inner.maintain()


def start(folder: Path, eviction: str, seed: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            use(folder, eviction, seed)
        finally:
            os._exit(BROKEN)
    return child


def run(
    folder: Path,
    num_kills: int,
    eviction: str,
    seed: int = 1,
    num_processes: int = NUM_PROCESSES,
) -> Kills:
    """Kill that often; AssertionError where anything is wrong."""
    chance, kills = random.Random(seed), Kills()
    store = open_files(folder, eviction)  # it is never unused meanwhile
    (tier,) = store.tiers
    children = [start(folder, eviction, seed + i) for i in range(num_processes)]
    try:
        for number in range(num_kills):
            time.sleep(chance.random() * MAX_LIFE_S)
            index = chance.randrange(num_processes)
            kills.num_mid_write += stop(children[index])
            kill(children[index])
            children[index] = start(folder, eviction, seed + num_processes + number)
            kills.num_kills += 1
            (checked,) = ops.verify([tier], remove=False)
            assert checked.num_damaged == 0
            # The list is not of one moment: it may have a victim, and what was put for it.
            used_bytes = sum(entry.num_bytes for entry in tier.entries())
            assert used_bytes <= CAPACITY_BYTES + num_processes * compute_cost(BODY_BYTES)
            kills.max_used_bytes = max(kills.max_used_bytes, used_bytes)
    finally:
        for child in children:
            kill(child)
    assert sum(entry.num_bytes for entry in tier.entries()) <= CAPACITY_BYTES
    for i in range(2 * NUM_ENTRIES):  # all of the capacity can be used
        tier.put(name_of(f"last {i}"), body_of(f"last {i}", BODY_BYTES))
        used_bytes = sum(entry.num_bytes for entry in tier.entries())
        assert used_bytes <= CAPACITY_BYTES
    tolerated_bytes = CAPACITY_BYTES // COUNT_TOLERANCE_PARTS
    assert used_bytes <= tier.usage().used_bytes <= used_bytes + tolerated_bytes
    assert used_bytes > 0.9 * CAPACITY_BYTES
    store.close()
    return kills


def stop(child: int) -> bool:
    """Stop a process; whether it has a file open that has no name yet."""
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    opened = [str(path.readlink()) for path in Path(f"/proc/{child}/fd").iterdir()]
    return any("/#" in path for path in opened)


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGKILL, f"a process ended by itself with {status}"


def verify_as_a_user(folder: Path, eviction: str) -> int:
    """The exit code of `baton store verify`."""
    settings = [
        f"store.options.file.{key}={value}" for key, value in options(folder, eviction).items()
    ]
    command = [sys.executable, "-m", "baton.cli", "store", "verify", "--store", "file"]
    return subprocess.run(
        [*command, *(f"--set={setting}" for setting in settings)],
        env=dict(os.environ, BATON_CLUSTER_KEY=KEY),
        check=False,
        timeout=120,
    ).returncode


def main() -> None:
    """Report what was seen; exit code 1 and a traceback where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for eviction in ("lru", "s3fifo"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "kv"
            kills = run(folder, arguments.kills, eviction, arguments.seed)
            assert verify_as_a_user(folder, eviction) == 0
            print(f"{eviction}: {kills}, of {CAPACITY_BYTES} bytes; nothing wrong, nothing damaged")


if __name__ == "__main__":
    main()
