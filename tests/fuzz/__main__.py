"""`make fuzz`: damaged inputs for every decoder; see `tests.fuzz.campaign`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import Final

from tests.fuzz.campaign import (
    MAX_FOUND,
    Finding,
    Tally,
    file_name,
    grow_corpus,
    plan,
    run,
    run_input,
)
from tests.fuzz.targets import TARGETS

PROGRESS_S: Final = 10.0
PLACE: Final = Path("build/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs, of all targets")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other inputs")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=Path, help="one input, of the --target")
    parser.add_argument("--grow", type=int, default=0, metavar="N",
                        help="add to the corpus at most N inputs of each target")  # fmt: skip
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = options.target or list(TARGETS)
    if options.replay is not None:
        return replay(names[0], options.replay.read_bytes())
    return campaign(names, options)


def replay(name: str, data: bytes) -> int:
    outcome, finding = run_input(TARGETS[name], data)
    print(f"{name}: {outcome if finding is None else finding.what}")
    return 0 if finding is None else 1


def campaign(names: list[str], options: argparse.Namespace) -> int:
    tally, begun, shown = Tally(), time.monotonic(), 0.0
    for part in run(plan(names, options.count, options.seed), options.jobs):
        for kind in part.findings.keys() - tally.findings.keys():
            print(report(part.findings[kind]), flush=True)
        tally.add(part)
        spent_s = time.monotonic() - begun
        if spent_s - shown > PROGRESS_S:
            shown = spent_s
            num = tally.num_inputs.total()
            print(
                f"{num:,} of {options.count:,} inputs, {num / spent_s:,.0f}/s, "
                f"{len(tally.findings)} findings",
                flush=True,
            )
        if len(tally.findings) >= MAX_FOUND:
            break
    summarise(tally, time.monotonic() - begun)
    if options.grow:
        print(f"{grow_corpus(tally, options.grow)} inputs added to the corpus")
    return 1 if tally.findings else 0


def report(finding: Finding) -> str:
    """Keep the input; what is wrong, and the command that shows it again."""
    folder = PLACE / finding.target
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(finding.data)
    path.write_bytes(finding.data)
    return (
        f"{finding.what.rstrip()}\n  again: {sys.executable} -m tests.fuzz "
        f"--target {finding.target} --replay {path}\n"
    )


def summarise(tally: Tally, spent_s: float) -> None:
    for name, num in sorted(tally.num_inputs.items()):
        num_kinds = sum(of == name for of, _ in tally.kept)
        rate = num / max(1e-9, tally.seconds[name])
        print(f"{name:28} {num:10,} inputs {rate:10,.0f}/s {num_kinds:6,} answers")
    num = tally.num_inputs.total()
    rate, num_findings = num / spent_s, len(tally.findings)
    print(f"{num:,} inputs in {spent_s:.0f} s ({rate:,.0f}/s), {num_findings} findings")


if __name__ == "__main__":
    sys.exit(main())
