"""Faults of a fleet on Ray, on three hosts: do clients notice, and until when is it whole again?

    python benchmarks/bench_ray.py all [--json benchmarks/results/ray.json]   about 15 minutes
    python benchmarks/bench_ray.py processes …                                one session
    python benchmarks/bench_ray.py head-lost worker-killed …                  faults, in this order
    python benchmarks/bench_ray.py --list
    python benchmarks/bench_ray.py --table benchmarks/results/ray.json

Needs root, iproute2, util-linux, a C compiler, redis-server and Ray; prints what is missing. The
hosts are namespaces on this machine (tests.ray.hosts): one has Ray's head, the gateway and
the prefill worker, each of the others a decode worker (embedded engine, float32, the demo model).
In the session `gcs` the first has only Ray's head and Redis. Each session starts all of it anew:
`first_token_s` counts from the first `ray start` to the first token of the first stream; `stages`
are seconds from the `baton up`.

The faults are in tests/ray/chaos_faults.py. Two clients ask without a pause while one happens. What
is checked then, after each, is in tests/ray/chaos_play.py: the same greedy tokens as of a colocated
server, no failed or broken request, one owner of each name, nothing left. The exit code is 1 if
anything of that is not so.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from baton.testing.fleet import sigterm_as_ctrl_c

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.ray.chaos_faults import BY_NAME, FAULTS
from tests.ray.chaos_fleet import ask_colocated_server, chaos_fleet, find_missing
from tests.ray.chaos_play import play

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SESSIONS = {
    "processes": (
        "worker-killed",
        "prefill-killed",
        "worker-stopped",
        "supervisor-killed",
        "gateway-killed",
        "gateway-stopped",
    ),
    "hosts": ("slow-links", "disk-full", "key-wrong", "version-differs"),
    "clock-ahead": ("clock-ahead",),
    "commands": ("same-name", "upgrade"),
    "one-way": ("one-way",),
    "two-way": ("two-way",),
    "host-killed": ("host-killed",),
    "gcs": ("gcs-restarted", "head-restarted"),
    "head": ("head-lost", "worker-killed", "worker-stopped"),
}
"""By name: the faults that happen to one fleet, one after the other."""


def run_session(names: Sequence[str], known: dict[str, str]) -> Iterator[tuple[dict, dict]]:
    """Play faults on one fleet; what came of each, and how long the fleet's start took."""
    ahead, redis = "clock-ahead" in names, not {"gcs-restarted", "head-restarted"}.isdisjoint(names)
    with chaos_fleet(known, has_clock_ahead=ahead, has_redis=redis) as fleet:
        start = asdict(fleet.start)
        print(f"first token after {fleet.start.first_token_s:.1f} s", file=sys.stderr)
        for name in names:
            result = play(fleet, BY_NAME[name])
            print(describe(asdict(result)), file=sys.stderr)
            yield asdict(result), start
            if BY_NAME[name].spends_hosts or result.whole_s is None:
                break


def describe(result: dict) -> str:
    """One result in a line, and a line for each problem."""
    verdict = "PROBLEMS" if result["problems"] else "ok"
    head = ", without Ray's head" if result["without_head"] else ""
    whole, broken = _seconds(result["whole_s"]), result["num_broken"]
    line = f"{result['fault']}{head}: {verdict}; whole {whole} s, {broken} of "
    line += f"{result['num_answers']} broken; {result['proof']}"
    return "\n    ".join([line, *result["problems"], *result["signs"]])


def table(stored: dict) -> str:
    """The page's table: a row for the start, and one for each fault."""
    starts = sorted(each["first_token_s"] for each in stored["starts"].values())
    what = f"from `ray start` on 3 hosts to the first token: median of {len(starts)}, and all"
    spread = f"{statistics.median(starts):.1f} ({starts[0]:.1f} to {starts[-1]:.1f})"
    rows = [f"| {what} | {spread} | | | |"]
    for each in stored["results"]:
        fault = BY_NAME[each["fault"]]
        what = fault.what + (", without Ray's head" if each["without_head"] else "")
        broken = f"{each['num_broken']} of {each['num_answers']}"
        gap, problems = f"{each['longest_gap_s']:.1f}", len(each["problems"])
        rows.append(f"| {what} | {_seconds(each['whole_s'])} | {broken} | {gap} | {problems} |")
        if each["old_gone_s"] is not None:
            rows.append(
                f"| … from its end until the old worker is gone | {each['old_gone_s']:.1f} | | | |"
            )
    return "\n".join(rows)


def _seconds(value: float | None) -> str:
    return "not in time" if value is None else f"{value:.1f}"


def store(path: Path, session: str, result: dict, start: dict) -> None:
    """Replace one result in a file."""
    stored = {"results": [], "starts": {}} | (json.loads(path.read_text()) if path.exists() else {})
    key = lambda each: (each["without_head"], each["fault"])  # noqa: E731
    order = [fault.name for fault in FAULTS]
    kept = [each for each in stored["results"] if key(each) != key(result)] + [result]
    kept.sort(key=lambda each: (each["without_head"], order.index(each["fault"])))
    machine = {"python": platform.python_version(), "kernel": platform.release()}
    starts = stored["starts"] | {session: start}
    text = json.dumps({"machine": machine, "starts": starts, "results": kept}, indent=1)
    path.write_text(text + "\n", "utf-8")


def main() -> None:
    """Play sessions, or print what there is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="all, sessions, or faults")
    parser.add_argument("--json", type=Path, help="replace these results in that file")
    parser.add_argument("--table", type=Path, help="print the table of that file's results")
    parser.add_argument("--list", action="store_true", help="print the sessions and their faults")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text("utf-8"))))
        return
    if given.list or not given.names:
        for session, names in SESSIONS.items():
            print(session + "".join(f"\n    {name}: {BY_NAME[name].what}" for name in names))
        return
    sessions = _choose(parser, given.names)
    if missing := find_missing():
        raise SystemExit("three hosts on this machine need\n  " + "\n  ".join(missing))
    with sigterm_as_ctrl_c():
        is_green = _play(sessions, given.json)
    raise SystemExit(0 if is_green else 1)


def _play(sessions: dict[str, tuple[str, ...]], file: Path | None) -> bool:
    """Play them one after the other: whether all checks held."""
    with tempfile.TemporaryDirectory(prefix="baton-colocated-") as folder:
        known = ask_colocated_server(Path(folder))
    is_green = True
    for session, names in sessions.items():
        for result, start in run_session(names, known):
            is_green &= not result["problems"]
            if file:
                store(file, session, result, start)
    return is_green


def _choose(parser: argparse.ArgumentParser, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Sessions by their name; faults that are named are one session together."""
    if names == ["all"]:
        return SESSIONS
    if all(name in SESSIONS for name in names):
        return {name: SESSIONS[name] for name in names}
    if unknown := [name for name in names if name not in BY_NAME]:
        parser.error(f"no fault or session: {', '.join(unknown)}; see --list")
    return {" ".join(names): tuple(names)}


if __name__ == "__main__":
    main()
