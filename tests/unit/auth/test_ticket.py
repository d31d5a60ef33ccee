from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, TicketIssue, WorkerRef, seal, unseal
from baton.errors import ConfigError, TicketError
from baton.ids import Epoch, TicketId, WorkerId

KEY = ClusterKey(b"k" * 32)
TICKET = Ticket(
    id=TicketId(b"i" * 16),
    request_id="req-1",
    prefill=WorkerRef(WorkerId("p"), Epoch("a" * 32), "127.0.0.1:1"),
    decode=WorkerRef(WorkerId("d"), Epoch("b" * 32), "127.0.0.1:2"),
    mode="push",
    issue=TicketIssue(Epoch("c" * 32), 7, 1.5, 60.0),
    tenant_salt="tenant",
)


def test_a_sealed_ticket_comes_back() -> None:
    assert unseal(seal(TICKET, KEY), KEY) == TICKET


def test_another_key_is_refused() -> None:
    with pytest.raises(TicketError, match="not signed"):
        unseal(seal(TICKET, KEY), ClusterKey(b"x" * 32))


@given(position=st.integers(0, 10_000), bit=st.integers(0, 5))
def test_any_flipped_bit_is_refused(position: int, bit: int) -> None:
    text = seal(TICKET, KEY)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    at = position % (len(text) - 1)  # the last character carries padding bits that say nothing
    flipped = alphabet[alphabet.index(text[at]) ^ (1 << bit)]
    with pytest.raises(TicketError):
        unseal(text[:at] + flipped + text[at + 1 :], KEY)


@given(st.text(max_size=5000))
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(TicketError):
        unseal(text, KEY)


def test_a_signed_body_of_another_shape_is_refused() -> None:
    body = msgspec.msgpack.encode({"t": "ticket", "id": "not bytes"})
    text = base64.urlsafe_b64encode(body + KEY.sign("ticket", body)).decode().rstrip("=")
    with pytest.raises(TicketError, match="decode"):
        unseal(text, KEY)


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 1e300])
def test_a_moment_that_no_clock_has_is_refused(at: float) -> None:
    """It would make every later ticket of the same gateway look expired."""
    text = seal(
        msgspec.structs.replace(TICKET, issue=TicketIssue(Epoch("c" * 32), 7, at, 60.0)), KEY
    )
    with pytest.raises(TicketError, match="decode"):
        unseal(text, KEY)


def test_the_key_is_never_shown_and_short_ones_are_refused() -> None:
    assert "kkkk" not in repr(KEY)
    with pytest.raises(ConfigError, match="openssl rand"):
        ClusterKey(b"short")
    with pytest.raises(ConfigError, match="hexadecimal"):
        ClusterKey.from_hex("not hex")


def test_a_ticket_that_was_read_is_not_sealed_again_unless_for_another_key() -> None:
    text = seal(TICKET, KEY)
    read = unseal(text, KEY)
    assert read == TICKET
    assert seal(read, KEY) is text
    assert seal(read, ClusterKey.generate()) != text
    assert seal(msgspec.structs.replace(read, request_id="another"), KEY) != text
