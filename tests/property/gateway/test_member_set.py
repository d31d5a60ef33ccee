"""Which workers several sources list, against a naive model; and the registry that follows it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from yarl import URL

from baton.gateway.members.member_set import CONFIGURED, ROLES, MemberSet
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.workers import Draining, Pending, Rejected, Up, Workers
from baton.protocol.worker_http import Role
from tests.examples import examples
from tests.unit.gateway.test_workers import info

SOURCES = (CONFIGURED, "file:/a", "dns:decode=b:1")
URLS = tuple(f"https://10.0.0.{n}:8100" for n in range(1, 5))
addresses = st.frozensets(
    st.builds(WorkerAddress, st.sampled_from(URLS), st.sampled_from(ROLES), st.booleans()),
    max_size=6,
)
WRITTEN = ("{}", "{}/")  # of one origin


class Lists(RuleBasedStateMachine):
    """Sources list workers in any order; workers identify themselves, fail and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.members = MemberSet(SOURCES)
        self.lists: dict[str, frozenset[WorkerAddress]] = dict.fromkeys(SOURCES, frozenset())
        self.metrics = GatewayMetrics()
        self.workers = Workers((), self.metrics)
        self.conflicts: set[str] = set()

    @rule(source=st.sampled_from(SOURCES), listed=addresses, written=st.sampled_from(WRITTEN))
    def lists(self, source, listed, written):
        as_written = frozenset(
            WorkerAddress(written.format(each.url), each.role, each.draining) for each in listed
        )
        new = self.members.update(source, as_written)
        self.lists[source] = listed
        self.workers.set_members(self.members.listings)
        expected = set(self.expected_conflicts())
        assert [str(conflict) for conflict in new] == sorted(expected - self.conflicts), "once each"
        self.conflicts = expected

    @rule(data=st.data(), what=st.sampled_from(["identifies", "fails", "drains"]))
    def changes(self, data, what):
        if not self.workers.all:
            return
        worker = data.draw(st.sampled_from(self.workers.all))
        if what == "identifies":
            name = f"w{URLS.index(str(worker.url))}"
            self.workers.register(worker, info(worker=name, role="both"))
        elif what == "fails":
            self.workers.lose(worker, "refused")
        else:
            self.workers.drain(worker)

    @rule()
    def forgets(self):
        self.workers.remove([worker for worker in self.workers.all if not worker.sources])

    def entries(self, url: str) -> list[tuple[str, WorkerAddress]]:
        """Who lists a URL, the deciding entry first."""
        return [
            (source, address)
            for source in SOURCES
            for role in Role
            for address in sorted(self.lists[source], key=lambda each: each.url)
            if address.url == url and address.role is role
        ]

    def expected_conflicts(self) -> list[str]:
        found: list[str] = []
        for url in URLS:
            entries = self.entries(url)
            found += [
                f"{url} is a {entries[0][1].role} worker by {entries[0][0]}, and a "
                f"{address.role} worker by {source}: it is used as a {entries[0][1].role} worker; "
                "list it with one role"
                for source, address in entries
                if address.role is not entries[0][1].role
            ]
        return found

    @invariant()
    def each_url_is_listed_by_all_that_name_it(self):
        expected = {}
        for url in URLS:
            if entries := self.entries(url):
                drained = [source for source, address in entries if address.draining]
                expected[URL(url)] = (
                    entries[0][1].role,
                    tuple(dict.fromkeys(source for source, _ in entries)),
                    tuple(dict.fromkeys(drained)),
                )
        listings = self.members.listings
        shown = {u: (each.role, each.sources, each.drained_by) for u, each in listings.items()}
        assert shown == expected
        for source in SOURCES:
            assert self.members.num_listed(source) == len({each.url for each in self.lists[source]})

    @invariant()
    def the_registry_has_what_is_listed_and_what_leaves(self):
        workers = self.workers.all
        urls = [worker.url for worker in workers]
        assert len(set(urls)) == len(urls)
        listed = {worker.url for worker in workers if worker.sources}
        assert listed == set(self.members.listings)
        usable = set()
        for worker in workers:
            listing = self.members.listings.get(worker.url)
            assert not worker.is_gone
            if listing is None or listing.drained_by:
                assert worker.why_withdrawn
                assert not worker.is_available
                assert not isinstance(worker.state, Up)
            else:
                assert worker.why_withdrawn is None
                assert (worker.address.role, worker.sources) == (listing.role, listing.sources)
            if worker.is_available:
                usable.add(worker.info.worker)
            assert isinstance(worker.state, Pending | Rejected) == (worker.info is None)
        placed = {
            view.id: view.role
            for served in self.workers.fleet.models.values()
            for view in (*served.prefills, *served.decodes)
            if view.available
        }
        assert placed.keys() == usable
        for name, role in placed.items():
            assert self.workers.with_id(name).address.role is role

    @invariant()
    def metrics_have_the_registry_and_nothing_else(self):
        shown = {
            (sample.labels["url"], sample.labels["role"]): bool(sample.value)
            for family in self.metrics._worker_up.collect()
            for sample in family.samples
        }
        assert shown == {
            (str(worker.url), str(worker.address.role)): worker.is_available
            for worker in self.workers.all
        }


TestLists = Lists.TestCase
TestLists.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


def test_a_drain_that_a_worker_reports_is_kept_when_it_is_listed_again():
    """The registry does not take it for up before it has answered."""
    workers = Workers((), GatewayMetrics())
    members = MemberSet(SOURCES)
    address = frozenset({WorkerAddress(URLS[0], Role.DECODE)})
    members.update("file:/a", address)
    workers.set_members(members.listings)
    (worker,) = workers.all
    workers.register(worker, info())
    members.update("file:/a", frozenset())
    workers.set_members(members.listings)
    assert worker.state == Draining(info())
    members.update("file:/a", address)
    workers.set_members(members.listings)
    assert worker.state == Draining(info())
    workers.register(worker, info())
    assert worker.state == Up(info())
    assert workers.all == (worker,)
