"""Measures each attack: `python -m tests.abuse [--seconds 10] [--json FILE] [NAME …]`.

An honest client asks for a stream of two tokens, 20 times a second at most, without the attack and
beside it. The attacker is a process of its own with the lowest priority: measured is what the fleet
does for it, and not the processor time that the attacker itself takes from a small machine.
The exit status is 1 where a bound of docs/security.md is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from baton.testing.fleet import start_command
from tests.abuse.attacks import ATTACKS, Attack
from tests.abuse.victims import (
    MAX_GROWTH_MIB,
    HonestClient,
    Victims,
    running_victims,
    until_memory_is_back,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_P99_RATIO: Final = 2.0
INTERVAL_S: Final = 0.05


@dataclass(frozen=True)
class Row:
    """One attack: TTFT without it and beside it, in milliseconds, and MiB that any process grew."""

    attack: str
    num_rounds: int
    num_before: int
    p50_before_ms: float
    p99_before_ms: float
    num_beside: int
    p50_beside_ms: float
    p99_beside_ms: float
    p50_after_ms: float
    max_growth_mib: int
    num_counted: int

    @property
    def is_within_bounds(self) -> bool:
        ratio = self.p99_beside_ms / self.p99_before_ms
        return ratio <= MAX_P99_RATIO and self.max_growth_mib <= MAX_GROWTH_MIB


async def ask_while(honest: HonestClient, goes_on: Callable[[], bool]) -> list[float]:
    """TTFT of requests one after another, in milliseconds."""
    measured: list[float] = []
    while goes_on():
        began_at = time.monotonic()
        measured.append(await honest.measure_ttft_s() * 1e3)
        await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began_at)))
    return measured


async def measure(victims: Victims, attack: Attack, for_s: float) -> Row:
    honest = HonestClient(victims.gateway.url)
    for _ in range(20):
        await honest.measure_ttft_s()
    until = time.monotonic() + for_s
    before = await ask_while(honest, lambda: time.monotonic() < until)
    memory = victims.read_rss_bytes()
    counted = await victims.read_metric(attack.victim, attack.counted)
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.abuse.attacks", attack.name, str(for_s),
        msgspec.json.encode(victims.addresses).decode(),
        stdout=asyncio.subprocess.PIPE, preexec_fn=lambda: os.nice(19),
    )  # fmt: skip
    beside = await ask_while(honest, lambda: attacker.returncode is None)
    printed, _ = await attacker.communicate()
    assert attacker.returncode == 0, f"{attack.name} itself failed"
    grown = await until_memory_is_back(victims, memory)
    after = [await honest.measure_ttft_s() * 1e3 for _ in range(20)]
    return Row(
        attack.name,
        int(printed),
        len(before),
        *_p50_p99(before),
        len(beside),
        *_p50_p99(beside),
        round(statistics.median(after), 2),
        max(grown.values()),
        int(await victims.read_metric(attack.victim, attack.counted) - counted),
    )


def _p50_p99(measured: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(measured)
    return round(statistics.median(ordered), 2), round(ordered[int(len(ordered) * 0.99)], 2)


async def measure_all(victims: Victims, attacks: Sequence[Attack], for_s: float) -> list[Row]:
    print(
        f"{'TTFT in ms':22}{'rounds':>7}{'p50/p99 before':>18}{'beside':>18}"
        f"{'p99 ratio':>11}{'MiB':>5}{'counted':>9}"
    )
    rows: list[Row] = []
    for attack in attacks:
        row = await measure(victims, attack, for_s)
        rows.append(row)
        print(
            f"{row.attack:22}{row.num_rounds:>7}"
            f"{row.p50_before_ms:>10.1f} /{row.p99_before_ms:>6.1f}"
            f"{row.p50_beside_ms:>10.1f} /{row.p99_beside_ms:>6.1f}"
            f"{row.p99_beside_ms / row.p99_before_ms:>11.2f}{row.max_growth_mib:>5}"
            f"{row.num_counted:>9}{'' if row.is_within_bounds else '   over'}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse")
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks; all, if none is given")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    known = {attack.name: attack for attack in ATTACKS}
    if unknown := set(options.names) - known.keys():
        parser.error(f"no such attack: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    chosen = [known[name] for name in options.names or known]
    with (
        tempfile.TemporaryDirectory() as logs,
        running_victims(Path(logs), start_command) as victims,
    ):
        rows = asyncio.run(measure_all(victims, chosen, options.seconds))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    sys.exit(not all(row.is_within_bounds for row in rows))


if __name__ == "__main__":
    main()
