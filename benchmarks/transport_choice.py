"""Is the transport that two workers would choose the best one, at every size and shape?

    python benchmarks/transport_choice.py [--quick] [--transport NAME …] [--rounds N] [--json]

    two handoff agents connect ──► links probed      as in the product: its own code
    one pair for each transport ──► times            in turn, transfer by transfer
    links + times ──► choices, regrets

Two hosts: `--listen HOST:PORT` on both, with one BATON_CLUSTER_KEY, then `--hosts A B` anywhere.
docs/bench-link.md, "The choice", describes the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from transport_choice_model import (
    PAGE_SIZES,
    QUICK,
    THOROUGH,
    ChoicePlan,
    ChoiceReport,
    MeasuredLink,
    Models,
    SurveyedLink,
    Timed,
    judge,
    print_choices,
    sum_up,
)

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, TicketIssuer, WorkerRef
from baton.bench.files import close_manifest, open_manifest
from baton.bench.link.listen import Listener, listen
from baton.bench.link.report import LinkEntry, Skipped
from baton.bench.link.runner import choose_transports
from baton.bench.progress import StepProgress
from baton.clock import Clock, MachineClock
from baton.config.environment import read_environment
from baton.errors import BatonError, ConfigError, ProtocolError, TransferError
from baton.handoff.agent import HandoffAgent
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.kv.layout import KVLayout
from baton.rig.backend import Backend, BackendContext, BackendSpec, Traits
from baton.rig.node import build_transport, run_node
from baton.rig.nodes import Address, LocalNodes, Nodes, RemoteNodes
from baton.rig.pages import Direction, Workload, parse_size
from baton.rig.pair import NodePair, SampleBudget, WrongBytesError
from baton.transfer.interface import TRANSPORTS, Transport, TransportContext
from baton.transfer.links.choice import NullObserver
from baton.transfer.links.cost_model import LinkModel
from baton.transfer.region import allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.rig.backend import Build

NODE: Final = (sys.executable, str(Path(__file__).resolve()), "--node")
AGENT: Final = "agent"
LAYOUT: Final = KVLayout.gqa(1, 2, 64, block_size=16, dtype="bfloat16")
NUM_BLOCKS: Final = 64
TICKET_LIFE_S: Final = 60.0
SURVEY_TIMEOUT_S: Final = 15.0
DIRECTIONS: Final[tuple[Direction, ...]] = ("push", "pull")
FAR_BEHIND: Final = 4.0


class AgentMetadata(msgspec.Struct, frozen=True):
    """A worker that listens. `absent`: a transport that does not work here → why."""

    ref: WorkerRef
    absent: dict[str, str]


class ProbeRequest(msgspec.Struct, frozen=True):
    """Wait until the agent has measured these links, at most `SURVEY_TIMEOUT_S`."""

    direction: Direction
    kinds: tuple[str, ...]


class AgentBackend(Backend):
    """A worker without an engine: its handoff agent probes the links to another one.

    The driver reads what it receives, the owner is written to. So the driver probes both ways: it
    writes to the worker that dials it, and reads from the one that it dials.
    """

    def __init__(self, options: Mapping[str, object], context: BackendContext) -> None:
        self._clock = context.clock
        self._issuer = TicketIssuer(context.clock)
        self.traits = Traits(AGENT, (), "memcpy", bytes_of="its own")
        self.region = self.target = allocate_shared_region([(NUM_BLOCKS, LAYOUT.page_bytes(0))])
        epoch = new_epoch()
        transports, self._absent = _build_all(
            options, TransportContext(context.credentials, epoch, context.host, context.clock)
        )
        self._links = _MeasuredLinks()
        self._agent = HandoffAgent(
            AgentOptions(
                worker=WorkerId(context.role),
                epoch=epoch,
                fingerprint="transport choice",
                views=(KVView(LAYOUT, self.region),),
                transports=transports,
                credentials=context.credentials,
                clock=context.clock,
                host=context.host,
                preferred_op="READ" if context.role == "driver" else "WRITE",
            )
        )
        self._agent.observe_links(self._links)
        self._agent.start(lambda: None)
        self._ref = WorkerRef(WorkerId(context.role), epoch, self._agent.address)

    def local_metadata(self) -> bytes:
        """See `Backend`."""
        return msgspec.msgpack.encode(AgentMetadata(self._ref, self._absent))

    def call(self, name: str, payload: bytes) -> bytes:
        """See `Backend`: `dial` another agent, or wait for `links`."""
        if name == "dial":
            ref = msgspec.msgpack.decode(payload, type=AgentMetadata).ref
            ticket = Ticket(
                new_ticket_id(), "bench", ref, self._ref, "push", self._issuer.issue(TICKET_LIFE_S)
            )
            self._agent.decline(ticket, "only to connect")
            return b""
        if name == "links":
            request = msgspec.msgpack.decode(payload, type=ProbeRequest)
            return msgspec.msgpack.encode(self._links.wait_for(request.direction, request.kinds))
        raise ProtocolError(f"an agent has no operation {name!r}")

    def close(self) -> None:
        """See `Backend`."""
        self._agent.stop()
        super().close()


class _MeasuredLinks(NullObserver):
    """See `LinkObserver`. Written by the agent's thread, read by the main one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._models: dict[tuple[str, str], LinkModel] = {}

    def measured(self, direction: Direction, transport: str, model: LinkModel) -> None:
        """See `LinkObserver`."""
        with self._changed:
            self._models[direction, transport] = model
            self._changed.notify_all()

    def wait_for(self, direction: Direction, kinds: Sequence[str]) -> tuple[MeasuredLink, ...]:
        """The links of these kinds that were measured within `SURVEY_TIMEOUT_S`."""
        wanted = {(direction, kind) for kind in kinds}
        with self._changed:
            self._changed.wait_for(lambda: wanted <= self._models.keys(), SURVEY_TIMEOUT_S)
            found = {kind: self._models.get((direction, kind)) for kind in kinds}
        return tuple(
            MeasuredLink(kind, m.latency_s, m.descriptor_s, m.byte_s, m.num_probes)
            for kind, m in found.items()
            if m is not None
        )


def _build_all(
    options: Mapping[str, object], context: TransportContext
) -> tuple[tuple[Transport, ...], dict[str, str]]:
    """The transports that work here, and why the others do not."""
    built: list[Transport] = []
    absent: dict[str, str] = {}
    for kind, given in options.items():
        try:
            built.append(TRANSPORTS.build(kind, given)(context))
        except BatonError as exc:
            absent[kind] = str(exc)[:1000]
    return tuple(built), absent


def build_backend(command: Build, context: BackendContext) -> Backend:
    """Build a transport, or an agent; see `BuildBackend`."""
    if command.name == AGENT:
        return AgentBackend(command.options, context)
    return build_transport(command, context)


Survey: TypeAlias = "Mapping[Direction, Models]"
"""What the driver found: `survey[direction][transport]`."""


def survey(
    nodes: Nodes, transports: Sequence[LinkEntry], wanted: Mapping[Direction, set[str]]
) -> Survey:
    """Let two agents connect and probe the `wanted` links.

    Raises:
        TransferError: an agent did not start, or ended.
    """
    spec = BackendSpec("peer", AGENT, {each.name: dict(each.options) for each in transports})
    with NodePair(spec, 1, nodes) as pair:
        pair.call("owner", "dial", pair.metadata["driver"])
        pushes = _wait(pair, "push", wanted)
        pair.call("driver", "dial", pair.metadata["owner"])
        pulls = _wait(pair, "pull", wanted)
        return {"push": pushes, "pull": pulls}


def _wait(pair: NodePair, direction: Direction, wanted: Mapping[Direction, set[str]]) -> Models:
    request = ProbeRequest(direction, tuple(sorted(wanted[direction])))
    answer = pair.call("driver", "links", msgspec.msgpack.encode(request))
    links = msgspec.msgpack.decode(answer, type=tuple[MeasuredLink, ...])
    return {each.transport: _model(each) for each in links}


def _model(link: MeasuredLink) -> LinkModel:
    return LinkModel(link.latency_s, link.descriptor_s, link.byte_s, num_probes=link.num_probes)


@dataclass(slots=True)
class _Found:
    """Results so far."""

    surveys: list[Survey] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    skipped: dict[str, Skipped] = field(default_factory=dict)

    def skip(self, entry: LinkEntry, error: Exception) -> None:
        is_wrong = isinstance(error, WrongBytesError)
        self.skipped[entry.name] = Skipped("transport", entry.name, str(error), is_wrong)


@dataclass(frozen=True, slots=True)
class ChoiceRunner:
    """Measures."""

    plan: ChoicePlan
    nodes: Nodes
    progress: StepProgress
    clock: Clock

    def run(self) -> ChoiceReport:
        """All of it.

        Raises:
            ConfigError, AuthenticationError: a listener cannot be used at all.
            TransferError: no two agents can connect here.
        """
        self.nodes.check()
        found, manifest = _Found(), open_manifest(sys.argv, self.clock)
        try:
            readable = self._time_all(found)
            self._survey_all(found, readable)
        finally:
            self.progress.end()
        cells = judge(found.timed, found.surveys)
        return ChoiceReport(
            manifest=close_manifest(manifest),
            links=_list_links(found.surveys),
            cells=cells,
            surveyed=sum_up([each for cell in cells for each in cell.surveyed]),
            skipped=tuple(found.skipped.values()),
        )

    def _survey_all(self, found: _Found, wanted: Mapping[Direction, set[str]]) -> None:
        able = [each for each in self.plan.transports if each.name not in found.skipped]
        for number in range(self.plan.effort.num_surveys):
            self.progress.begin(f"two workers connect: {number + 1}")
            found.surveys.append(survey(self.nodes, able, wanted))
            self.progress.advance(1)

    def _time_all(self, found: _Found) -> dict[Direction, set[str]]:
        """Times of all cells; which transports move bytes, in either direction."""
        able: dict[Direction, set[str]] = {direction: set() for direction in DIRECTIONS}
        for page_bytes in PAGE_SIZES:
            with ExitStack() as stack:
                pairs = self._open_all(stack, page_bytes, found)
                for entry, pair in pairs.items():
                    for direction in set(pair.traits.directions) & able.keys():
                        able[direction].add(entry.name)
                for workload in self.plan.workloads_of(page_bytes):
                    self.progress.begin(f"{workload.name}")
                    for direction in DIRECTIONS:
                        self._time(workload, direction, pairs, found)
                    self.progress.advance(1)
        return able

    def _open_all(
        self, stack: ExitStack, page_bytes: int, found: _Found
    ) -> dict[LinkEntry, NodePair]:
        pairs: dict[LinkEntry, NodePair] = {}
        num_pages = self.plan.num_pages_of(page_bytes)
        for entry in self.plan.transports:
            if entry.name in found.skipped:
                continue
            try:
                pairs[entry] = stack.enter_context(
                    NodePair(entry, num_pages, self.nodes, page_bytes)
                )
            except (TransferError, ConfigError) as exc:
                found.skip(entry, exc)
        return pairs

    def _time(
        self,
        workload: Workload,
        direction: Direction,
        pairs: dict[LinkEntry, NodePair],
        found: _Found,
    ) -> None:
        """One cell: every transport in each round. One that fails is left out from here on."""
        effort = self.plan.effort
        each_round = SampleBudget(effort.budget_s, 1, effort.max_samples)
        samples: dict[LinkEntry, tuple[float, ...]] = {}
        for number in range(effort.num_rounds):
            for entry, pair in tuple(pairs.items()):
                if direction not in pair.traits.directions or _is_far_behind(entry, samples):
                    continue
                self.progress.show(f"{direction}, {entry.name}")
                try:
                    if number == 0:
                        pair.verify(workload, direction)
                    timings = pair.measure(workload, direction, each_round)
                except TransferError as exc:
                    found.skip(entry, exc)
                    del pairs[entry]
                    samples.pop(entry, None)
                else:
                    samples[entry] = samples.get(entry, ()) + timings.samples_s
        if samples:
            by_name = {entry.name: times for entry, times in samples.items()}
            found.timed.append(Timed(workload, direction, by_name))


def _is_far_behind(entry: LinkEntry, samples: Mapping[LinkEntry, tuple[float, ...]]) -> bool:
    """Whether it was so much slower in the first round that more samples change nothing."""
    mine = samples.get(entry)
    if mine is None:
        return False
    best_s = min(statistics.median(times) for times in samples.values())
    return statistics.median(mine) > FAR_BEHIND * best_s


def _list_links(surveys: Sequence[Survey]) -> tuple[SurveyedLink, ...]:
    return tuple(
        SurveyedLink(
            number,
            direction,
            MeasuredLink(kind, m.latency_s, m.descriptor_s, m.byte_s, m.num_probes),
        )
        for number, one in enumerate(surveys)
        for direction, models in one.items()
        for kind, m in models.items()
    )


def main() -> int:
    """Measure and print, or be a node, or listen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="small and short: does it work?")
    parser.add_argument("--transport", action="append", default=[], help="only this one")
    parser.add_argument("--sizes", help="message sizes, as 32KiB,1MiB")
    parser.add_argument("--rounds", type=int, help="rounds of timing, and surveys")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--listen", metavar="HOST:PORT", help="run nodes for another host")
    parser.add_argument("--hosts", nargs=2, metavar=("A", "B"), help="two listeners")
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.node:
        run_node(build_backend)
    try:
        return _listen(flags.listen) if flags.listen else _measure(flags)
    except BatonError as exc:
        print(exc, file=sys.stderr)
        return 2


def _measure(flags: argparse.Namespace) -> int:
    effort = QUICK if flags.quick else THOROUGH
    if flags.rounds is not None:
        effort = replace(effort, num_rounds=flags.rounds, num_surveys=flags.rounds)
    if flags.sizes is not None:
        effort = replace(effort, sizes=tuple(parse_size(text) for text in flags.sizes.split(",")))
    plan = ChoicePlan(choose_transports(flags.transport, TRANSPORTS.kinds(), {}), effort)
    clock = MachineClock()
    nodes: Nodes = LocalNodes(clock, NODE)
    if flags.hosts:
        driver, owner = (_address(text) for text in flags.hosts)
        nodes = RemoteNodes(driver, owner, _key(), clock)
    progress = StepProgress(len(plan.workloads) + effort.num_surveys)
    report = ChoiceRunner(plan, nodes, progress, clock).run()
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_choices(report, sys.stdout)
    is_bad = any(each.is_wrong or each.name in flags.transport for each in report.skipped)
    return 1 if is_bad or not report.cells else 0


def _listen(text: str) -> int:
    listen(_address(text), Listener(_key(), MachineClock(), print, NODE))
    return 0


def _key() -> Credentials:
    return Credentials.of(ClusterKey.from_hex(read_environment()["BATON_CLUSTER_KEY"]))


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


if __name__ == "__main__":
    sys.exit(main())
