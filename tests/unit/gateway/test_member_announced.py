"""What one worker announces harms no other one."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.auth.credentials import Credentials
from baton.clock import Instant, MachineClock
from baton.gateway.members.announced import AnnouncedWorkers
from baton.gateway.members.announced_metrics import AnnouncementMetrics
from baton.gateway.members.lease_table import MAX_STALE_ENTRIES, LeaseTable, Outcome
from baton.gateway.options import WorkerAddress
from baton.ids import Epoch, WorkerId
from baton.net.tls import ClusterTls
from baton.protocol.announcements import Announcement, seal_announcement
from baton.protocol.worker_http import Role

HONEST = Announcement(
    worker=WorkerId("honest"),
    epoch=Epoch("a" * 32),
    url="https://h:1",
    role=Role.DECODE,
    lease_s=10.0,
    sequence=1,
)
OTHER = msgspec.structs.replace(HONEST, worker=WorkerId("other"), epoch=Epoch("b" * 32))


def replace(announcement: Announcement, **changes: object) -> Announcement:
    return msgspec.structs.replace(announcement, **changes)


class OneGateway:
    def __init__(self) -> None:
        self.credentials, self.registry = Credentials.generate(), CollectorRegistry()
        self.members = AnnouncedWorkers(
            self.credentials,
            ClusterTls(self.credentials),
            MachineClock(),
            AnnouncementMetrics(self.registry),
            takes_plain=False,
            list_gateways=tuple,
        )

    def announce(self, announcement: Announcement) -> str:
        sealed = seal_announcement(announcement, self.credentials)
        return asyncio.run(self.members.receive(sealed, self.credentials.signer.certificate)).result

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("host", ["é" + "x" * 70, "\ufffd", "xn--a"])
def test_an_address_that_no_gateway_can_use_is_refused_and_the_others_stay_listed(host: str):
    gateway = OneGateway()
    assert gateway.announce(replace(OTHER, url=f"https://{host}:1")) == "refused"
    assert gateway.announce(HONEST) == "accepted"
    assert gateway.members.addresses() == {WorkerAddress("https://h:1", Role.DECODE)}
    refused = "baton_gateway_refused_announcements_total"
    assert gateway.count(refused, reason="address") == 1


def test_a_farewell_after_the_end_of_the_lease_ends_no_lease():
    gateway = OneGateway()
    gateway.announce(HONEST)
    assert gateway.members.table.end(HONEST.worker, HONEST.epoch)
    for announcement in (replace(HONEST, sequence=2, is_farewell=True), OTHER):
        assert gateway.announce(announcement) == "accepted"
    assert gateway.count("baton_gateway_ended_leases_total", cause="farewell") == 0
    gateway.announce(replace(OTHER, sequence=2, is_farewell=True))
    assert gateway.count("baton_gateway_ended_leases_total", cause="farewell") == 1


@pytest.mark.parametrize("same", ["https://h:1/", "https://H:1", "HTTPS://h:01"])
def test_an_address_is_held_however_it_is_written(same: str):
    table, now = LeaseTable(), Instant(0.0)
    table.offer(HONEST, b"", now)
    assert table.offer(replace(OTHER, url=same), b"", now).outcome is Outcome.ADDRESS_HELD
    table.offer(replace(OTHER, url="https://h:2"), b"", now)
    moved = replace(OTHER, url=same, sequence=2)
    assert table.offer(moved, b"", Instant(1.0)).outcome is Outcome.ADDRESS_HELD
    renewed = replace(HONEST, url=same, sequence=2)  # its own
    assert table.offer(renewed, b"", Instant(1.0)).outcome is Outcome.ACCEPTED
    table.end(HONEST.worker, HONEST.epoch)
    assert table.offer(moved, b"", Instant(2.0)).outcome is Outcome.ACCEPTED


def test_a_worker_that_announces_and_ends_all_the_time_fills_no_memory():
    table, now = LeaseTable(), Instant(0.0)
    table.offer(HONEST, b"", now)
    for number in range(MAX_STALE_ENTRIES + 10):
        life = replace(OTHER, epoch=Epoch(f"{number:032}"), url="https://h:2", lease_s=3600.0)
        for each in (life, replace(life, sequence=2, is_farewell=True)):
            assert table.offer(each, b"", now).outcome is Outcome.ACCEPTED
    assert len(table._due) <= MAX_STALE_ENTRIES + 2
    assert table.lapse(Instant(10.0)) == [HONEST]
