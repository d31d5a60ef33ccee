"""Eight processes use one full folder, and one after the other is killed: `make store-kills`.

Each puts, reads, evicts and maintains at random; what it reads must be what was put. After each
kill every entry is read and compared with its digest, beside the processes that go on.

Of tier `file`, small entries have new files; large ones (`LARGE`) are written into files of those
that make room. Of tier `shared`, large ones lie in the pool.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import StoreError
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.ops import store as ops
from baton.store.folder.bodies import compute_cost, compute_pooled_cost
from baton.store.folder.body_pool import CLAIM_PREFIX, unpack_runs
from baton.store.folder.directory import UNFINISHED
from baton.store.folder.evictor import COUNT_TOLERANCE_PARTS
from baton.store.tiers.shared import SharedTier
from baton.testing.store_contract import body_of, name_of, read

if TYPE_CHECKING:
    from baton.store.tiered import TieredStore

KEY = "5" * 64
NUM_PROCESSES = 8
MAX_LIFE_S = 0.05
WRONG, BROKEN = 3, 4


@dataclass(frozen=True, slots=True)
class Load:
    """A store of `num_entries` bodies; twice as many are put in turn."""

    body_bytes: int
    num_entries: int
    kind: str = "file"

    @property
    def entry_bytes(self) -> int:
        if self.kind == "shared" and self.body_bytes >= SharedTier.min_pooled_bytes:
            return compute_pooled_cost(self.body_bytes)
        return compute_cost(self.body_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self.num_entries * self.entry_bytes

    def body(self, content: str) -> bytes:
        """A body that no other content has."""
        return _body(content, self.body_bytes)


@lru_cache(maxsize=512)
def _body(content: str, num_bytes: int) -> bytes:
    return body_of(content, num_bytes)


SMALL = Load(100_000, 64)
LARGE = Load((1 << 20) + 100, 24)
POOLED = Load((300 << 10) + 100, 64, "shared")


@dataclass(slots=True)
class Kills:
    """What was seen; `num_mid_write`: processes that were killed with an entry half written.

    `num_in_old_file`: those that were writing into the file of an entry that had made room.
    """

    num_kills: int = 0
    num_mid_write: int = 0
    num_in_old_file: int = 0
    max_used_bytes: int = 0


def options(folder: Path, eviction: str, load: Load) -> dict[str, object]:
    return {"directory": str(folder), "capacity_bytes": load.capacity_bytes, "eviction": eviction}


def open_store(folder: Path, eviction: str, load: Load) -> TieredStore:
    key = ClusterKey.from_hex(KEY)
    settings = {load.kind: options(folder, eviction, load)}
    return open_keyed_store((load.kind,), settings, key=key, clock=MachineClock())


def use(folder: Path, eviction: str, load: Load, seed: int) -> None:
    """One process, until it is killed. Exits with WRONG for a wrong answer."""
    chance = random.Random(seed)
    (tier,) = open_store(folder, eviction, load).tiers
    while True:
        content = f"entry {chance.randrange(2 * load.num_entries)}"
        found = read(tier, content)
        if found not in {None, load.body(content)}:
            os._exit(WRONG)
        with suppress(StoreError):  # others take what is freed, or hold the lock
            if found is None:
                tier.put(name_of(content), load.body(content))
            if chance.random() < 0.05:
                tier.discard(name_of(content))
            if chance.random() < 0.02:
                tier.inner.maintain()


def start(folder: Path, eviction: str, load: Load, seed: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            use(folder, eviction, load, seed)
        finally:
            os._exit(BROKEN)
    return child


def run(
    folder: Path,
    num_kills: int,
    eviction: str,
    load: Load = SMALL,
    seed: int = 1,
    *,
    num_processes: int = NUM_PROCESSES,
) -> Kills:
    """Kill that often; AssertionError where anything is wrong. `folder` is made."""
    folder.mkdir(mode=0o700)
    chance, kills = random.Random(seed), Kills()
    store = open_store(folder, eviction, load)  # it is never unused meanwhile
    (tier,) = store.tiers
    for i in range(2 * load.num_entries):
        load.body(f"entry {i}")  # children that are forked have it
    children = [start(folder, eviction, load, seed + i) for i in range(num_processes)]
    try:
        for number in range(num_kills):
            time.sleep(chance.random() * MAX_LIFE_S)
            index = chance.randrange(num_processes)
            opened = stop(children[index])
            kills.num_mid_write += any("/#" in path or holds_claim(path) for path in opened)
            kills.num_in_old_file += any(f"/{UNFINISHED}" in path for path in opened)
            kill(children[index])
            children[index] = start(folder, eviction, load, seed + num_processes + number)
            kills.num_kills += 1
            (checked,) = ops.verify([tier], remove=False)
            assert checked.num_damaged == 0
            # The list is not of one moment: it may have a victim, and what was put for it.
            used_bytes = sum(entry.num_bytes for entry in tier.entries())
            assert used_bytes <= load.capacity_bytes + num_processes * load.entry_bytes
            kills.max_used_bytes = max(kills.max_used_bytes, used_bytes)
    finally:
        for child in children:
            kill(child)
    assert sum(entry.num_bytes for entry in tier.entries()) <= load.capacity_bytes
    for i in range(2 * load.num_entries):  # all of the capacity can be used
        tier.put(name_of(f"last {i}"), load.body(f"last {i}"))
        used_bytes = sum(entry.num_bytes for entry in tier.entries())
        assert used_bytes <= load.capacity_bytes
    # What the killed ones had reserved is taken back once there is no room.
    tolerated_bytes = load.capacity_bytes // COUNT_TOLERANCE_PARTS
    tolerated_bytes += num_processes * load.entry_bytes
    assert used_bytes <= tier.usage().used_bytes <= used_bytes + tolerated_bytes
    assert used_bytes > 0.9 * load.capacity_bytes
    assert verify_as_a_user(folder, eviction, load) == 0
    store.close()
    return kills


def stop(child: int) -> list[str]:
    """Stop a process; the files that it has open."""
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    return [str(path.readlink()) for path in Path(f"/proc/{child}/fd").iterdir()]


def holds_claim(path: str) -> bool:
    """Whether this is a process's claim on extents of the pool that it is about to fill."""
    if f"/{CLAIM_PREFIX}" not in path or path.endswith(" (deleted)"):  # that is a dead one's
        return False
    return bool(unpack_runs(Path(path).read_bytes()))


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGKILL, f"a process ended by itself with {status}"


def verify_as_a_user(folder: Path, eviction: str, load: Load = SMALL) -> int:
    """The exit code of `baton store verify`."""
    chosen = options(folder, eviction, load)
    settings = [f"store.options.{load.kind}.{key}={value}" for key, value in chosen.items()]
    command = [sys.executable, "-m", "baton.cli", "store", "verify", "--store", load.kind]
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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_at, seen = time.monotonic(), []
    for eviction, load in (("lru", SMALL), ("s3fifo", SMALL), ("lru", LARGE), ("lru", POOLED)):
        with tempfile.TemporaryDirectory() as place:
            kills = run(Path(place) / "kv", arguments.kills, eviction, load, arguments.seed)
        seen.append({"eviction": eviction} | asdict(load) | asdict(kills))
        print(f"{eviction}, {load}: {kills}; nothing wrong, nothing damaged")
    if arguments.json is not None:
        figures = {
            "stores": seen,
            "processes": NUM_PROCESSES,
            "command": " ".join(["python -m tests.chaos.store_kills", *sys.argv[1:]]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds": round(time.monotonic() - began_at, 1),
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
