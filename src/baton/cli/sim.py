"""`baton sim`."""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter

from baton.cli.exit_codes import FAILED, INTERRUPTED
from baton.clock import MachineClock
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.sim.handoff.campaign import Outcome, Tally

PROGRESS_EVERY_S = 2.0

app = App(name="sim", help="Run Baton against simulated faults.")


class Found(msgspec.Struct, frozen=True):
    """A seed that breaks an invariant."""

    seed: int
    invariant: str
    what: str
    replay: str


class SimulationReport(msgspec.Struct, frozen=True):
    """What `--json` prints. `faults` counts those that took effect, `seen` modes and leases."""

    first_seed: int
    num_schedules: int
    seconds: float
    schedules_per_s: float
    num_steps: int
    virtual_s: float
    interrupted: bool
    requests: dict[str, int]
    faults: dict[str, int]
    seen: dict[str, int]
    found: list[Found]


@app.command
def handoff(
    *,
    schedules: Annotated[int, Parameter(help="How many seeds to run.")] = 1000,
    first_seed: Annotated[int, Parameter(help="The first of them.")] = 0,
    jobs: Annotated[int, Parameter(help="Processes.")] = 1,
    seed: Annotated[
        int | None, Parameter(help="Run this one alone, and shorten it if it fails.")
    ] = None,
    log: Annotated[bool, Parameter(help="With --seed: print what happened.")] = False,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
) -> int:
    """Run the handoff's production code in simulated clusters, under faults that seeds draw.

    Invariants are checked at each step; a seed that breaks one is printed with the command that
    replays it, and the exit code is 1.
    """
    if schedules < 1 or jobs < 1:
        raise ConfigError("--schedules and --jobs are at least 1")
    if seed is not None:
        if json:
            raise ConfigError("--json is for many seeds: --seed prints text")
        return _replay(seed, wants_log=log)
    if log:
        raise ConfigError("--log is for one seed: give --seed")
    return _run(first_seed, schedules, jobs, as_json=json)


def _replay(seed: int, *, wants_log: bool) -> int:
    # Here, so that --help imports nothing heavy.
    from baton.sim.handoff.campaign import (  # noqa: PLC0415
        be_quiet,
        run_schedule,
        shrink,
    )
    from baton.sim.handoff.generating import generate_schedule  # noqa: PLC0415

    be_quiet()
    outcome = run_schedule(generate_schedule(seed), keeps_log=True)
    if outcome.violation is not None:
        shorter = shrink(outcome.schedule)
        num_left_out = _count(outcome) - _count(run := run_schedule(shorter, keeps_log=True))
        print(f"seed {seed} without {num_left_out} of its faults and clients:")
        outcome = run
    _print_schedule(outcome)
    if wants_log:
        print("\n".join(outcome.log))
    if outcome.violation is None:
        print(f"seed {seed}: no invariant broke in {outcome.num_steps} steps")
        return 0
    print(f"seed {seed}: {outcome.violation.invariant}: {outcome.violation.what}")
    return FAILED


def _count(outcome: "Outcome") -> int:
    return len(outcome.schedule.faults) + len(outcome.schedule.clients)


def _print_schedule(outcome: "Outcome") -> None:
    schedule = outcome.schedule
    print(f"transports {', '.join(schedule.kinds)}; the op is {schedule.op}")
    for thing in (*schedule.workers, *schedule.clients, *schedule.faults):
        print(f"  {thing}")


def _run(first_seed: int, num_schedules: int, num_jobs: int, *, as_json: bool) -> int:
    from baton.sim.handoff.campaign import Tally, be_quiet, run_campaign  # noqa: PLC0415

    be_quiet()
    clock = MachineClock()
    began_at = shown_at = clock.now()
    tally, is_interrupted = Tally(), False
    try:
        for tally in run_campaign(first_seed, num_schedules, num_jobs):
            if clock.now() - shown_at > PROGRESS_EVERY_S:
                shown_at = clock.now()
                _show(tally, num_schedules, shown_at - began_at)
    except KeyboardInterrupt:
        is_interrupted = True
    report = _report(tally, first_seed, clock.now() - began_at, is_interrupted=is_interrupted)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print(report)
    if report.found:
        return FAILED
    return INTERRUPTED if is_interrupted else 0


def _show(tally: "Tally", num_schedules: int, seconds: float) -> None:
    rate = tally.num_schedules / max(seconds, 1e-9)
    left_s = (num_schedules - tally.num_schedules) / max(rate, 1e-9)
    line = f"{tally.num_schedules} of {num_schedules} schedules, {rate:.0f}/s, {left_s:.0f} s left"
    print(f"baton: {line}, {len(tally.found)} found", file=sys.stderr, flush=True)


def _report(
    tally: "Tally", first_seed: int, seconds: float, *, is_interrupted: bool
) -> SimulationReport:
    return SimulationReport(
        first_seed=first_seed,
        num_schedules=tally.num_schedules,
        seconds=round(seconds, 1),
        schedules_per_s=round(tally.num_schedules / max(seconds, 1e-9), 1),
        num_steps=tally.num_steps,
        virtual_s=round(tally.virtual_s, 1),
        interrupted=is_interrupted,
        requests=dict(tally.ends.most_common()),
        faults=dict(tally.injected.most_common()),
        seen=dict(tally.seen.most_common()),
        found=[
            Found(seed, each.invariant, each.what, f"baton sim handoff --seed {seed} --log")
            for seed, each in sorted(tally.found.items())
        ],
    )


def _print(report: SimulationReport) -> None:
    for found in report.found:
        print(f"seed {found.seed} breaks {found.invariant}: {found.what}\n  replay: {found.replay}")
    ended = "interrupted after" if report.interrupted else "ran"
    print(
        f"{ended} {report.num_schedules} schedules in {report.seconds} s "
        f"({report.schedules_per_s}/s): {report.num_steps} steps, {report.virtual_s} simulated s"
    )
    print("requests: " + ", ".join(f"{num} {end}" for end, num in report.requests.items()))
    for title, counts in (
        ("modes and leases", report.seen),
        ("faults that took effect", report.faults),
    ):
        print(f"{title}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    print(f"{len(report.found)} seeds broke an invariant")
