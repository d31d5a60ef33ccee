"""Lets two workers meet some times, then times every transport in turn, cell by cell."""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from baton import __version__
from baton.bench.choice.judging import Timed, judge, sum_up
from baton.bench.choice.plan import PAGE_SIZES
from baton.bench.choice.report import ChoiceManifest, ChoiceReport, SurveyedLink
from baton.bench.choice.surveying import DIRECTIONS, Meeting, survey
from baton.bench.orders import MeasuredLink
from baton.bench.pair import Pair, WrongBytesError
from baton.bench.plan import Effort
from baton.bench.report import Skipped
from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.bench.choice.plan import ChoicePlan
    from baton.bench.ends import Ends
    from baton.bench.plan import Entrant
    from baton.bench.progress import Progress
    from baton.bench.workload import Direction, Workload
    from baton.clock import Clock


FAR_BEHIND: Final = 4.0


@dataclass(slots=True)
class _Found:
    """What there is so far."""

    meetings: list[Meeting] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    skipped: dict[str, Skipped] = field(default_factory=dict)

    def skip(self, entrant: Entrant, error: Exception) -> None:
        is_wrong = isinstance(error, WrongBytesError)
        self.skipped[entrant.name] = Skipped("transport", entrant.name, str(error), is_wrong)


@dataclass(frozen=True, slots=True)
class ChoiceConductor:
    """Measures. `command` is what the person typed, for the manifest."""

    plan: ChoicePlan
    ends: Ends
    progress: Progress
    clock: Clock
    command: Sequence[str]

    def conduct(self) -> ChoiceReport:
        """All of it. Ctrl-C ends it early, with the cells that were measured so far.

        Raises:
            ConfigError, AuthenticationError: a listening end cannot be used at all.
            TransferError: no two agents can meet here.
        """
        self.ends.check()
        found = _Found()
        began, load_before = self.clock.unix_now(), os.getloadavg()
        is_partial = False
        try:
            readable = self._time_all(found)
            self._survey_all(found, readable)
        except KeyboardInterrupt:
            is_partial = True
        finally:
            self.progress.end()
        cells = judge(found.timed, [meeting.links for meeting in found.meetings])
        machines = found.meetings[-1].machines if found.meetings else {}
        return ChoiceReport(
            is_partial=is_partial,
            manifest=ChoiceManifest(
                baton=__version__,
                started_at=datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
                command=tuple(self.command),
                num_surveys=self.plan.effort.num_surveys,
                num_rounds=self.plan.effort.num_rounds,
                budget_s=self.plan.effort.budget_s,
                driver=machines.get("driver"),
                owner=machines.get("owner"),
                load_before=load_before,
                load_after=os.getloadavg(),
            ),
            links=_list_links(found.meetings),
            cells=cells,
            surveyed=sum_up([each for cell in cells for each in cell.surveyed]),
            refined=sum_up([each for cell in cells for each in cell.refined]),
            skipped=tuple(found.skipped.values()),
        )

    def _survey_all(self, found: _Found, wanted: Mapping[Direction, set[str]]) -> None:
        able = [each for each in self.plan.transports if each.name not in found.skipped]
        for number in range(self.plan.effort.num_surveys):
            self.progress.begin(f"two workers meet: {number + 1}")
            found.meetings.append(survey(self.ends, able, wanted))
            self.progress.advance(1)

    def _time_all(self, found: _Found) -> dict[Direction, set[str]]:
        """Times of all cells; which transports move bytes, in either direction."""
        able: dict[Direction, set[str]] = {direction: set() for direction in DIRECTIONS}
        for page_bytes in PAGE_SIZES:
            with ExitStack() as stack:
                pairs = self._open_all(stack, page_bytes, found)
                for entrant, pair in pairs.items():
                    for direction in set(pair.traits.directions) & able.keys():
                        able[direction].add(entrant.name)
                for workload in self.plan.workloads_of(page_bytes):
                    self.progress.begin(f"{workload.name}")
                    for direction in DIRECTIONS:
                        self._time(workload, direction, pairs, found)
                    self.progress.advance(1)
        return able

    def _open_all(self, stack: ExitStack, page_bytes: int, found: _Found) -> dict[Entrant, Pair]:
        pairs: dict[Entrant, Pair] = {}
        num_pages = self.plan.num_pages_of(page_bytes)
        for entrant in self.plan.transports:
            if entrant.name in found.skipped:
                continue
            try:
                pairs[entrant] = stack.enter_context(
                    Pair(entrant, num_pages, self.ends, page_bytes)
                )
            except (TransferError, ConfigError) as exc:
                found.skip(entrant, exc)
        return pairs

    def _time(
        self, workload: Workload, direction: Direction, pairs: dict[Entrant, Pair], found: _Found
    ) -> None:
        """One cell: every transport in each round. One that fails is left out from here on."""
        effort = self.plan.effort
        each_round = Effort(1, effort.budget_s, 1, effort.max_samples, 1, 1)
        samples: dict[Entrant, tuple[float, ...]] = {}
        for number in range(effort.num_rounds):
            for entrant, pair in tuple(pairs.items()):
                if direction not in pair.traits.directions or _is_far_behind(entrant, samples):
                    continue
                self.progress.show(f"{direction}, {entrant.name}")
                try:
                    if number == 0:
                        pair.verify(workload, direction)
                    taken = pair.measure(workload, direction, each_round)
                except TransferError as exc:
                    found.skip(entrant, exc)
                    del pairs[entrant]
                    samples.pop(entrant, None)
                else:
                    samples[entrant] = samples.get(entrant, ()) + taken.samples_s
        if samples:
            by_name = {entrant.name: times for entrant, times in samples.items()}
            found.timed.append(Timed(workload, direction, by_name))


def _is_far_behind(entrant: Entrant, samples: Mapping[Entrant, tuple[float, ...]]) -> bool:
    """Whether more samples would say nothing new: in the first round it was much slower."""
    mine = samples.get(entrant)
    if mine is None:
        return False
    best_s = min(statistics.median(times) for times in samples.values())
    return statistics.median(mine) > FAR_BEHIND * best_s


def _list_links(meetings: Sequence[Meeting]) -> tuple[SurveyedLink, ...]:
    return tuple(
        SurveyedLink(
            number,
            direction,
            MeasuredLink(kind, m.latency_s, m.descriptor_s, m.byte_s, m.num_probes),
        )
        for number, meeting in enumerate(meetings)
        for direction, models in meeting.links.items()
        for kind, m in models.items()
    )
