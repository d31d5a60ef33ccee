"""Two handoff agents meet, as two workers do, and measure every link between them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.bench.orders import Dial, Done, Join, Joined, Survey, Surveyed
from baton.bench.pair import ask
from baton.transfer.links.model import LinkModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.bench.contender import Role
    from baton.bench.ends import End, Ends
    from baton.bench.machine import Machine
    from baton.bench.orders import MeasuredLink
    from baton.bench.plan import Entrant
    from baton.bench.workload import Direction

SURVEY_TIMEOUT_S: Final = 15.0
DIRECTIONS: Final[tuple[Direction, ...]] = ("push", "pull")

Models = dict[str, LinkModel]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the driver found: `links[direction][transport]`, in the transports' order."""

    links: Mapping[Direction, Models]
    absent: Mapping[str, str]
    machines: Mapping[Role, Machine]


def survey(
    ends: Ends, transports: Sequence[Entrant], wanted: Mapping[Direction, set[str]]
) -> Meeting:
    """Let two agents meet; waits for the `wanted` links, but not for ever.

    Raises:
        TransferError: an agent did not start, or ended.
    """
    options = {each.name: dict(each.options) for each in transports}
    with closing(ends.open("owner", None)) as owner, closing(ends.open("driver", None)) as driver:
        both = (driver, owner)
        theirs = ask(owner, both, Join(options, "owner"), Joined)
        ours = ask(driver, both, Join(options, "driver"), Joined)
        ask(owner, both, Dial(ours.ref), Done)
        pushes = _wait(driver, both, "push", wanted)
        ask(driver, both, Dial(theirs.ref), Done)
        pulls = _wait(driver, both, "pull", wanted)
    machines: dict[Role, Machine] = {"driver": ours.machine, "owner": theirs.machine}
    return Meeting({"push": pushes, "pull": pulls}, {**theirs.absent, **ours.absent}, machines)


def _wait(
    driver: End, both: Sequence[End], direction: Direction, wanted: Mapping[Direction, set[str]]
) -> Models:
    order = Survey(direction, tuple(sorted(wanted[direction])), SURVEY_TIMEOUT_S)
    return {each.transport: _model(each) for each in ask(driver, both, order, Surveyed).links}


def _model(link: MeasuredLink) -> LinkModel:
    return LinkModel(link.latency_s, link.descriptor_s, link.byte_s, num_probes=link.num_probes)
