"""A gateway is ready once somebody decodes, and prefill workers have had their time."""

import pytest

from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.readiness import PREFILL_STARTUP_GRACE_S, Readiness
from baton.gateway.workers import Workers
from baton.router.fleet import Role
from baton.testing.clocks import ManualClock
from tests.unit.gateway.test_workers import info

PREFILL, DECODE = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.fixture
def workers() -> Workers:
    addresses = (WorkerAddress(PREFILL, Role.PREFILL), WorkerAddress(DECODE, Role.DECODE))
    return Workers(addresses, GatewayMetrics())


def test_it_waits_for_prefill_workers_but_not_for_ever(workers):
    clock = ManualClock()
    readiness = Readiness(workers, clock)
    assert PREFILL in readiness.why_not()
    workers.register(workers.all[1], info())
    assert PREFILL in readiness.why_not()
    clock.advance(PREFILL_STARTUP_GRACE_S)
    assert readiness.why_not() is None


def test_it_is_ready_as_soon_as_all_are_known(workers):
    readiness = Readiness(workers, ManualClock())
    workers.register(workers.all[0], info(worker="prefill-0", role="prefill"))
    assert DECODE in readiness.why_not()
    workers.register(workers.all[1], info())
    assert readiness.why_not() is None
    workers.lose(workers.all[0], "it does not answer")
    assert readiness.why_not() is None
