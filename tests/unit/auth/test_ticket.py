from __future__ import annotations

import base64
import pickle

import msgspec
import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.certificates import Authority, Identity, IdentityRole, to_pem
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import (
    Ticket,
    TicketIssue,
    WorkerRef,
    derive_rank_ticket,
    seal,
    unseal,
    write_unsigned,
)
from baton.auth.verified_tickets import MAX_VERIFIED_TICKETS
from baton.errors import ConfigError, TicketError
from baton.ids import Epoch, TicketId, WorkerId

KEY = Credentials.of(ClusterKey(b"k" * 32))
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


def test_a_ticket_without_a_signature_is_taken_from_a_gateways_connection_alone() -> None:
    text = write_unsigned(TICKET)
    ticket = unseal(text, KEY, is_from_gateway=True)
    assert (ticket, seal(ticket, KEY)) == (TICKET, text)
    with pytest.raises(TicketError, match="not signed"):
        unseal(text, KEY)


def test_a_derived_ticket_without_a_signature_is_no_better() -> None:
    text = write_unsigned(TICKET) + ".0.0"
    assert unseal(text, KEY, is_from_gateway=True) == TICKET
    with pytest.raises(TicketError, match="not signed"):
        unseal(text, KEY)


def test_another_key_is_refused() -> None:
    with pytest.raises(TicketError, match="not signed"):
        unseal(seal(TICKET, KEY), Credentials.of(ClusterKey(b"x" * 32)))


@given(position=st.integers(0, 10_000), bit=st.integers(0, 5))
def test_any_flipped_bit_is_refused_or_changes_nothing(position: int, bit: int) -> None:
    """A certificate in DER has a count of unused bits, which parsers may leave unread."""
    text = seal(TICKET, KEY)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    at = position % (len(text) - 1)  # the last character carries padding bits that say nothing
    flipped = alphabet[alphabet.index(text[at]) ^ (1 << bit)]
    changed = text[:at] + flipped + text[at + 1 :]
    try:
        read = unseal(changed, KEY)
    except TicketError:
        return
    assert read == TICKET
    assert _certificate_of(changed) != _certificate_of(text)


def _certificate_of(text: str) -> bytes:
    _, certificate, _ = msgspec.msgpack.decode(base64.urlsafe_b64decode(text + "=="))
    assert isinstance(certificate, bytes)
    return certificate


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_of_body_or_signature_is_refused(position: int, bit: int) -> None:
    body, certificate, signature = msgspec.msgpack.decode(
        base64.urlsafe_b64decode(seal(TICKET, KEY) + "==")
    )
    flipped = bytearray(body + signature)
    flipped[position % len(flipped)] ^= 1 << bit
    parts = [bytes(flipped[:-64]), certificate, bytes(flipped[-64:])]
    with pytest.raises(TicketError):
        unseal(base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).decode().rstrip("="), KEY)


@given(st.text(max_size=5000))
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(TicketError):
        unseal(text, KEY)


@pytest.mark.parametrize("is_from_gateway", [False, True])
def test_a_ticket_of_many_ranks_is_refused(*, is_from_gateway: bool) -> None:
    with pytest.raises(TicketError):
        unseal("x" + ".0.0" * 1000, KEY, is_from_gateway=is_from_gateway)


def test_a_signed_body_of_another_shape_is_refused() -> None:
    body = msgspec.msgpack.encode({"t": "ticket", "id": "not bytes"})
    with pytest.raises(TicketError, match="decode"):
        unseal(signed(body), KEY)


def signed(body: bytes) -> str:
    signer = KEY.signer
    parts = [body, signer.certificate, signer.sign(b"baton/ticket/2|" + body)]
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).decode().rstrip("=")


def test_only_gateways_sign() -> None:
    authority = Authority.generate()
    gateway, worker = (
        Credentials(ClusterKey.generate(), lambda identity=identity: identity)
        for identity in (
            issue(authority, IdentityRole.GATEWAY),
            issue(authority, IdentityRole.WORKER),
        )
    )
    assert unseal(seal(TICKET, gateway), worker) == TICKET
    with pytest.raises(TicketError, match="the peer is worker w, and this takes a gateway"):
        unseal(seal(TICKET, worker), worker)


def test_a_text_is_verified_once() -> None:
    """As the gateway's connection vouched for it: the signature is a worker's, which is refused."""
    authority = Authority.generate()
    reader, other, signer = (
        Credentials(ClusterKey.generate(), lambda identity=identity: identity)
        for identity in [issue(authority, IdentityRole.WORKER)] * 3
    )
    text = seal(TICKET, signer)
    with pytest.raises(TicketError, match="takes a gateway"):
        unseal(text, reader)
    read = unseal(text, reader, is_from_gateway=True)
    assert unseal(text, reader) is read
    changed = seal(msgspec.structs.replace(TICKET, request_id="another"), signer)
    for forged, by in ((changed, reader), (text, other)):
        with pytest.raises(TicketError, match="takes a gateway"):
            unseal(forged, by)


def test_few_texts_are_remembered() -> None:
    reader = Credentials.of(ClusterKey(b"k" * 32))
    texts = [
        seal(msgspec.structs.replace(TICKET, request_id=str(number)), KEY)
        for number in range(MAX_VERIFIED_TICKETS + 1)
    ]
    for text in texts:
        unseal(text, reader, is_from_gateway=True)
    known = [text for text in texts if reader.verified_tickets.find(text) is not None]
    assert known == texts[1:]
    assert unseal(texts[0], reader).request_id == "0"


def issue(authority: Authority, role: IdentityRole) -> Identity:
    certificate, private_key = authority.issue([role], "w")
    return Identity(
        certificate.public_bytes(Encoding.PEM), authority.certificate, to_pem(private_key)
    )


def test_the_ticket_of_two_ranks_is_the_servers_with_their_numbers() -> None:
    refs = [
        msgspec.structs.replace(ref, rank_addresses=("127.0.0.1:1", "127.0.0.1:2"))
        for ref in (TICKET.prefill, TICKET.decode)
    ]
    whole = msgspec.structs.replace(TICKET, prefill=refs[0], decode=refs[1])
    read = unseal(seal(whole, KEY), KEY)
    of_ranks = derive_rank_ticket(read, 1, 0)
    text = seal(of_ranks, KEY)
    assert text == f"{seal(read, KEY)}.1.0"
    assert unseal(text, KEY) == of_ranks != read
    assert of_ranks.prefill.worker == "p/1"
    assert of_ranks.prefill.address == "127.0.0.1:2"
    for absent in (".2.0", ".0.2", ".1.0.1.0", ".a.0", ".-1.0", ".1"):
        with pytest.raises(TicketError):
            unseal(seal(read, KEY) + absent, KEY)


def test_a_ticket_keeps_its_text_from_process_to_process() -> None:
    text = seal(TICKET, KEY)
    copied = pickle.loads(pickle.dumps(unseal(text, KEY)))
    assert copied == TICKET
    assert seal(copied, KEY) == text


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
        Credentials.of(ClusterKey(b"short"))
    with pytest.raises(ConfigError, match="hexadecimal"):
        Credentials.of(ClusterKey.from_hex("not hex"))


def test_a_ticket_that_was_read_is_not_signed_again() -> None:
    text = seal(TICKET, KEY)
    read = unseal(text, KEY)
    assert read == TICKET
    assert seal(read, Credentials.of(ClusterKey(b"x" * 32))) == text
    assert seal(msgspec.structs.replace(read, request_id="another"), KEY) != text
