"""`baton autoscale` on real processes: growth, a preempted worker, shrinking.

    python benchmarks/bench_autoscale.py [--json benchmarks/results/autoscale.json]
    python benchmarks/bench_autoscale.py --table benchmarks/results/autoscale.json

A fleet of one prefill and one decode worker on this machine (`baton up --detach`, embedded engine,
the demo model in float32, one thread for each worker), under clients that ask for greedy streams
without a pause. One after the other:

    load      many clients: until the fleet has more workers
    notice    a preemption notice for a decode worker: until it has left, until another one serves
    calm      one client: until the fleet has one worker of each role again; the rate of the last
              minute counts, so this takes more than that

Times are from the beginning of each. A failed answer is any but 200, a stream without its end, or
other tokens than were known before. The limit of a token's time is `SLOWER` times what it takes one
client alone: seconds say how soon something is decided and done, not how much a worker can do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from baton.launch.fleet import FleetMember, FleetStatus

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.greedy_load import GreedyLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FLEET: Final = "bench-autoscale"
CALL_TIMEOUT_S: Final = 60.0
PHASE_TIMEOUT_S: Final = 120.0
PROMPTS: Final = tuple(f"{word} by the sea, told again. " * 40 for word in "ABCDEFGHIJKLMNOP")
MAX_TOKENS: Final = 64
SETTINGS: Final = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "preemption.source": "file",
    "preemption.interval_s": 0.2,
}
SCALING: Final = {
    "max_prefill": 1,
    "max_decode": 2,
    "ttft_s": 5,
    "interval_s": 1,
    "grow_every_s": 10,
    "shrink_after_s": 10,
}


SLOWER: Final = 3.0


@dataclass
class Run:
    """What was seen, in seconds from each phase's beginning."""

    tpot_s: float = 0.0
    grown_s: float = 0.0
    left_s: float = 0.0
    replaced_s: float = 0.0
    shrunk_s: float = 0.0
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    machine: str = f"{os.cpu_count()} cores, Python {platform.python_version()}"


class Fleet:
    """The fleet, by its own commands. `notices`: where a worker's notice is a file of its name."""

    def __init__(self, environment: dict[str, str], notices: Path) -> None:
        self._environment, self._notices = environment, notices

    def call(self, *arguments: str) -> str:
        """Run a command to its end; its output."""
        done = subprocess.run(
            [sys.executable, "-m", "baton.cli", *arguments, "--fleet", FLEET],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=CALL_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0 and arguments[0] != "status":  # whose code is the fleet's
            raise SystemExit(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self) -> None:
        """One worker of each role."""
        settings = {**SETTINGS, "preemption.file": f"{self._notices}/{{worker}}"}
        sets = [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
        self.call("up", "--detach", "--port", "0", "--prefill", "1", "--decode", "1", *sets)

    def members(self) -> dict[str, FleetMember]:
        """All processes by name."""
        text = self.call("status", "--json")
        return {each.name: each for each in msgspec.json.decode(text, type=FleetStatus).members}

    def count(self) -> Counter[str]:
        """Workers that serve, by role."""
        return Counter(each.role for each in self.members().values() if each.state == "ready")

    def preempt(self, worker: str) -> None:
        """Its machine will be taken."""
        (self._notices / worker).touch()

    @contextmanager
    def autoscaled(self, url: str, tpot_s: float, decisions: list[str]) -> Iterator[None]:
        """`baton autoscale` runs; its lines are kept."""
        scaling = {**SCALING, "tpot_s": tpot_s}
        sets = [w for n, v in scaling.items() for w in ("--set", f"scaling.{n}={v}")]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "baton.cli", "autoscale"),
                *("--gateway", url, "--fleet", FLEET, *sets),
            ],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        def read() -> None:
            for line in process.stdout or ():
                decisions.append(line.rstrip())
                print("  autoscale:", line, end="", flush=True)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(CALL_TIMEOUT_S)
            reader.join(CALL_TIMEOUT_S)


def until(what: str, condition: Callable[[], bool], began_at: float) -> float:
    """Seconds from `began_at` until it is so."""
    while not condition():
        if time.monotonic() - began_at > PHASE_TIMEOUT_S:
            raise SystemExit(f"not {what} within {PHASE_TIMEOUT_S:g} s")
        time.sleep(0.2)
    took_s = time.monotonic() - began_at
    print(f"{what}: {took_s:.1f} s", flush=True)
    return took_s


def measure_token_s(load: GreedyLoad) -> float:
    """What a token takes one client, as the median of five answers."""
    took = []
    for _ in range(5):
        began_at = time.monotonic()
        load.ask(load.prompts[0])
        took.append((time.monotonic() - began_at) / MAX_TOKENS)
    return statistics.median(took)


def run(fleet: Fleet) -> Run:
    """All phases."""
    found = Run()
    fleet.start()
    try:
        url = fleet.members()["gateway"].url or ""
        load = GreedyLoad(url, PROMPTS, MAX_TOKENS)
        load.learn()
        calm = GreedyLoad(url, PROMPTS[:1], MAX_TOKENS)
        calm.learn()
        found.tpot_s = SLOWER * measure_token_s(calm)
        print(f"limit of a token: {1000 * found.tpot_s:.1f} ms", flush=True)
        with fleet.autoscaled(url, found.tpot_s, found.decisions):
            with load.running():
                began_at = time.monotonic()
                found.grown_s = until(
                    "more workers", lambda: fleet.count()["decode"] == 2, began_at
                )
                began_at = time.monotonic()
                fleet.preempt("decode-0")
                found.left_s = until(
                    "decode-0 has left", lambda: "decode-0" not in fleet.members(), began_at
                )
                found.replaced_s = until(
                    "another one serves", lambda: fleet.count()["decode"] == 2, began_at
                )
            with calm.running():
                found.shrunk_s = until(
                    "as few as before", lambda: fleet.count()["decode"] == 1, time.monotonic()
                )
        found.num_answers = load.num_answers + calm.num_answers
        found.failures = load.failures + calm.failures
    finally:
        fleet.call("down")
    return found


def show_table(found: Run) -> str:
    """As docs/clusters/autoscaling.md has it."""
    rows = {
        "from load until a second decode worker serves": found.grown_s,
        "from a decode worker's preemption notice until it has left": found.left_s,
        "from the same until another one serves": found.replaced_s,
        "from the load's end until one decode worker is left": found.shrunk_s,
    }
    lines = ["| what | seconds |", "|---|---|", *(f"| {k} | {v:.1f} |" for k, v in rows.items())]
    return "\n".join([*lines, f"| failed answers | {len(found.failures)} of {found.num_answers} |"])


def main() -> None:
    """Run it, or print the table of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        print(show_table(Run(**json.loads(options.table.read_text()))))
        return
    with tempfile.TemporaryDirectory(prefix="baton-autoscale-") as folder:
        notices = Path(folder) / "notices"
        notices.mkdir()
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        found = run(Fleet(environment, notices))
    print(show_table(found))
    for failure in found.failures[:10]:
        print("failed:", failure)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
