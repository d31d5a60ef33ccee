"""KV between hosts has digests with a key of the link; within a host it needs none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.handoff import prefill_sender
from baton.handoff.interface import KVFailed
from baton.handoff.kv_views import AgentContext
from baton.kv.digest import DigestKey
from tests.integration.handoff_nodes import Handoff, make_handoff, node

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.handoff.grants import Granted
    from baton.handoff.messages import Grant, TransferOp
    from baton.handoff.peers import Peer

TCP, SHARED = ("tcp",), ("shared",)


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


@pytest.fixture(name="two_hosts")
def two_hosts_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between addresses of two hosts; tests/chaos/test_partitions.py has real ones."""
    monkeypatch.setattr(AgentContext, "is_on_this_host", lambda self, peer: False)


@pytest.fixture(name="grants")
def grants_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Grant]:
    """What decode workers grant."""
    grants: list[Grant] = []
    check = prefill_sender.check_grant

    def record(
        context: AgentContext, peer: Peer, grant: Grant, known: Ticket | None = None
    ) -> Granted:
        grants.append(grant)
        return check(context, peer, grant, known)

    monkeypatch.setattr(prefill_sender, "check_grant", record)
    return grants


@pytest.fixture(name="num_keyed")
def num_keyed_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts digests that were made with a key."""
    made, digest = [0], DigestKey.digest

    def count(key: DigestKey, layer: int, token: int, data: bytes | memoryview) -> bytes:
        made[0] += 1
        return digest(key, layer, token, data)

    monkeypatch.setattr(DigestKey, "digest", count)
    return made


def hand_over(handoff: Handoff) -> None:
    handoff.prefill.scribble(3)
    handoff.start_receive()
    handoff.start_send()
    handoff.compute(101)
    handoff.prefill_done()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("kinds", [TCP, SHARED, SHARED + TCP], ids="+".join)
def test_within_a_host_no_digest_has_a_key(
    kinds: tuple[str, ...],
    op: TransferOp,
    key: Credentials,
    grants: list[Grant],
    num_keyed: list[int],
) -> None:
    with (
        node("p", kinds=kinds, key=key) as prefill,
        node("d", kinds=kinds, key=key, op=op) as decode,
    ):
        handoff = make_handoff(prefill, decode)
        hand_over(handoff)
        handoff.check_landed()
        assert [(grant.op, grant.plain_digests) for grant in grants] == [(op, True)]
        assert num_keyed == [0]
        assert handoff.receiving.trace.transport == kinds[0]


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_between_hosts_each_digest_has_a_key(
    op: TransferOp, key: Credentials, grants: list[Grant], num_keyed: list[int]
) -> None:
    with node("p", kinds=TCP, key=key) as prefill, node("d", kinds=TCP, key=key, op=op) as decode:
        handoff = make_handoff(prefill, decode)
        hand_over(handoff)
        handoff.check_landed()
        assert [(grant.op, grant.plain_digests) for grant in grants] == [(op, False)]
        assert num_keyed[0] > 0


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_what_comes_between_hosts_with_another_key_is_not_taken(
    op: TransferOp, key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right bytes, with digests of somebody who knows them and not the key."""
    real, secrets = DigestKey.__init__, [b"1" * 32, b"2" * 32]

    def with_another(digest_key: DigestKey, secret: bytes, handoff: bytes) -> None:
        real(digest_key, secrets.pop(), handoff)

    monkeypatch.setattr(DigestKey, "__init__", with_another)
    with node("p", kinds=TCP, key=key) as prefill, node("d", kinds=TCP, key=key, op=op) as decode:
        handoff = make_handoff(prefill, decode)
        hand_over(handoff)
        (event,) = decode.wait_for()[:1]
        assert isinstance(event, KVFailed)
        assert "digest mismatch" in str(event.error)
        assert not secrets, "both ends made their key"
