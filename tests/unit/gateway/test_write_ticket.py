"""Which tickets the gateway signs: all but those of two workers that know who sends them."""

from __future__ import annotations

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import is_signed, unseal
from baton.gateway.options import WorkerAddress
from baton.gateway.protocol_adapters import write_ticket
from baton.gateway.workers import Worker, worker_view
from baton.protocol.worker_http import Role, WorkerInfo
from baton.router.health import DEFAULT_HEALTH
from tests.unit.handoff.orders import make_ticket

KEY = Credentials.of(ClusterKey(b"k" * 32))
INFO = WorkerInfo(
    worker="w", epoch="e" * 32, role=Role.BOTH, served_model_name="demo", fingerprint="f",
    max_context_tokens=4096, handoff_address="127.0.0.1:1", transports=("tcp",), version="0",
)  # fmt: skip


def view(scheme: str, *, takes_unsigned: bool):
    worker = Worker(WorkerAddress(f"{scheme}://127.0.0.1:1", Role.BOTH), DEFAULT_HEALTH)
    info = msgspec.structs.replace(INFO, takes_unsigned_tickets=takes_unsigned)
    return worker_view(worker, info)


KNOWS = view("https", takes_unsigned=True)
OLD = view("https", takes_unsigned=False)
PLAIN = view("http", takes_unsigned=True)


@pytest.mark.parametrize(
    ("prefill", "decode", "signs"),
    [(KNOWS, KNOWS, False), (OLD, KNOWS, True), (KNOWS, OLD, True), (PLAIN, KNOWS, True)],
)
def test_a_ticket_is_signed_unless_both_know_its_sender(prefill, decode, signs):
    ticket = make_ticket()
    text = write_ticket(ticket, prefill, decode, KEY)
    assert is_signed(text) is signs
    assert unseal(text, KEY, is_from_gateway=not signs).id == ticket.id
