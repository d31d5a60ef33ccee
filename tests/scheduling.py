"""Which tests run one after another in the same process of `make test`, and which begin first.

To start a server, or to import vLLM, takes seconds of processor time: tests of the same servers and
those that use vLLM stay together; all others stay together by file. The groups that take longest
begin first: the last ones are short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from _pytest.fixtures import SubRequest
    from xdist.remote import Producer

GROUPS: Final[Sequence[tuple[str, tuple[str, ...]]]] = (
    (
        "vLLM",
        (
            "tests/unit/engines_vllm/",
            "tests/property/test_vllm_",
            "tests/integration/test_vllm_rank",
            "tests/e2e_vllm/",
            "tests/chaos/test_vllm_faults.py",
            "tests/integration/test_kv_events.py",
            "tests/integration/test_vllm_worker.py",
        ),
    ),
    (
        "workers under faults",
        (
            "tests/chaos/test_client_disconnects.py",
            "tests/chaos/test_matrix.py",
            "tests/chaos/test_paused_workers.py",
            "tests/chaos/test_random_faults.py",
            "tests/chaos/test_resumed_streams.py",
            "tests/chaos/test_untrusted_peers.py",
            "tests/chaos/test_worker_crashes.py",
        ),
    ),
    (
        "workers",
        (
            "tests/e2e/test_alerts.py",
            "tests/e2e/test_client_fields.py",
            "tests/e2e/test_identities.py",
            "tests/e2e/test_openai_client.py",
            "tests/e2e/test_operators_tools.py",
            "tests/e2e/test_same_tokens.py",
            "tests/e2e/test_several_answers.py",
        ),
    ),
)
"""Each with the beginnings of its tests' paths; the first one that fits counts. These tests share
the servers of `tests/conftest.py`, `tests/chaos/conftest.py` or `tests/e2e/conftest.py`."""

SERVERS: Final = frozenset({"vllm_cluster_factory", "standing_cluster", "cluster", "oracle"})
"""Fixtures of the session whose servers end with the group that used them.
Servers that nobody uses still take processor time: gateways probe, workers renew their leases."""

LONG: Final = (
    "tests/property/sim/",
    "tests/property/router/test_division",
    "tests/integration/test_bench_link.py",
    "tests/integration/test_up_demo.py",
    "tests/integration/test_bench_architectures.py",
    "tests/e2e/test_stream_moves.py",
    "tests/abuse/",
    "tests/e2e/test_prefix_routing.py",
    "tests/integration/test_doctor.py",
    "tests/integration/test_by_reference.py",
    "tests/chaos/",
    "tests/e2e/",
    "tests/integration/",
    "tests/gpu/",
    "tests/contract/",
    "tests/property/",
)
"""Beginnings of the paths of files, those that take longest first; others come after them."""


def group_of(nodeid: str) -> str:
    """The tests that stay together with this one."""
    for name, beginnings in GROUPS:
        if nodeid.startswith(beginnings):
            return name
    return nodeid.partition("::")[0]


def rank_of(nodeid: str) -> tuple[int, int]:
    """Lower ones begin first; within a group, by its paths."""
    for rank, (_, beginnings) in enumerate(GROUPS):
        if nodeid.startswith(beginnings):
            return rank, _first_that_fits(nodeid, beginnings)
    return len(GROUPS), _first_that_fits(nodeid, LONG)


def _first_that_fits(nodeid: str, beginnings: tuple[str, ...]) -> int:
    fitting = (i for i, beginning in enumerate(beginnings) if nodeid.startswith(beginning))
    return next(fitting, len(beginnings))


class GroupScheduling(LoadScopeScheduling):
    """Gives whole groups to processes, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False  # by number of tests: it tells nothing here
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


class ServersOfGroups:
    """Ends the servers of a group after its last test: they would run to the end of the session.

    A plug-in of a process of xdist, whose tests are sorted by group; not a part of conftest.py,
    since the hooks of `tests/conftest.py` are not called for fixtures of the session.
    """

    def __init__(self) -> None:
        self._started: list[tuple[pytest.FixtureDef[object], SubRequest]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: SubRequest
    ) -> Generator[None, object, object]:
        """Note what was started."""
        value = yield
        if fixturedef.argname in SERVERS and fixturedef.scope == "session":
            self._started.append((fixturedef, request))
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """End what was started, and the fixtures that depend on it."""
        value = yield
        if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
            while self._started:
                fixturedef, request = self._started.pop()
                fixturedef.finish(request)
        return value
