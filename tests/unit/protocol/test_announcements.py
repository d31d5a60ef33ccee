"""Announcements on the wire: what a receiver takes, and why it refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.sealed import SealedMessage, decode_sealed, encode_sealed
from baton.errors import ConfigError
from baton.ids import Epoch, WorkerId
from baton.protocol.announcements import (
    MAX_ANNOUNCEMENT_BYTES,
    VERSION,
    Announcement,
    AnnouncementError,
    AnnouncementReply,
    Exchange,
    ExchangeReply,
    RefusalReason,
    read_announcement,
    require_https,
    seal_announcement,
)
from baton.protocol.worker_http import Role
from tests.integration.identities import Identities

KEY = Credentials.generate()


def make(**fields: Any) -> Announcement:
    given: dict[str, Any] = {
        "worker": WorkerId("w"),
        "epoch": Epoch("a" * 32),
        "url": "https://127.0.0.1:8100",
        "role": Role.BOTH,
        "lease_s": 6.0,
        "sequence": 1,
    }
    return Announcement(**(given | fields))


def refused(sealed: bytes, credentials: Credentials = KEY, sender: bytes | None = None) -> str:
    with pytest.raises(AnnouncementError) as caught:
        read_announcement(sealed, credentials, sender)
    return caught.value.reason


def test_a_signed_announcement_is_read_as_it_was_made() -> None:
    announcement = make(topology="z/r/h", is_farewell=True)
    sealed = seal_announcement(announcement, KEY)
    assert read_announcement(sealed, KEY) == announcement
    assert len(sealed) < MAX_ANNOUNCEMENT_BYTES / 2


@pytest.mark.parametrize("position", [20, 60, -1])
def test_a_changed_one_is_refused(position: int) -> None:
    sealed = bytearray(seal_announcement(make(), KEY))
    sealed[position] ^= 1
    assert refused(bytes(sealed)) in {RefusalReason.SIGNATURE, RefusalReason.MALFORMED}


def test_one_of_another_cluster_is_refused() -> None:
    assert refused(seal_announcement(make(), Credentials.generate())) == RefusalReason.SIGNATURE


def test_a_signature_for_another_purpose_is_refused() -> None:
    body = msgspec.msgpack.encode(make())
    sealed = encode_sealed(SealedMessage.sign(b"baton/ticket/2|", body, KEY))
    assert refused(sealed) == RefusalReason.SIGNATURE


def test_only_a_worker_of_that_name_announces_itself_so(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    gateway = identities.of("gateway", "g")
    worker = identities.of("worker", "w")
    own = seal_announcement(make(), worker)
    assert read_announcement(own, gateway).worker == "w"
    others = seal_announcement(make(), identities.of("worker", "x"))
    assert refused(others, gateway) == RefusalReason.NAME
    rank = seal_announcement(make(worker=WorkerId("w/0")), worker)
    assert refused(rank, gateway) == RefusalReason.NAME
    gateways = seal_announcement(make(), gateway)
    assert refused(gateways, gateway) == RefusalReason.SIGNATURE


def test_a_connections_certificate_stands_for_the_signature() -> None:
    message = decode_sealed(seal_announcement(make(), KEY))
    unsigned = encode_sealed(msgspec.structs.replace(message, signature=bytes(64)))
    assert read_announcement(unsigned, KEY, message.certificate) == make()
    assert refused(unsigned) == RefusalReason.SIGNATURE
    relayed = seal_announcement(make(), Credentials.of(KEY.key))  # of another process
    assert refused(relayed, KEY, message.certificate) == RefusalReason.SIGNATURE


def test_another_version_is_named() -> None:
    body = msgspec.msgpack.encode({"version": 2, "what": "is not known here"})
    sealed = encode_sealed(SealedMessage.sign(b"baton/announcement/1|", body, KEY))
    assert refused(sealed) == RefusalReason.VERSION


@pytest.mark.parametrize(
    "url",
    ["https://127.0.0.1", "ftp://h:1", "https://h:1/path", "https://u@h:1", "https://h:99999"],
)
def test_an_address_is_an_origin_with_a_port(url: str) -> None:
    assert refused(seal_announcement(make(url=url), KEY)) == RefusalReason.ADDRESS


@pytest.mark.parametrize("fields", [{"lease_s": 0.1}, {"sequence": 0}, {"epoch": "short"}])
def test_fields_are_bounded(fields: dict[str, object]) -> None:
    assert refused(seal_announcement(make(**fields), KEY)) == RefusalReason.MALFORMED


@pytest.mark.parametrize("sealed", [b"", b"garbage", b"\x93\x01\x02\x03", b"x" * 5000])
def test_garbage_is_refused(sealed: bytes) -> None:
    assert refused(sealed) == RefusalReason.MALFORMED


def test_gateways_are_named_with_https_and_a_port() -> None:
    require_https("worker.announce_to", ["https://gw:9000"])
    for url in ("http://gw:9000", "gw:9000", "https://gw"):
        with pytest.raises(ConfigError, match=r"worker\.announce_to"):
            require_https("worker.announce_to", [url])


PAGE = (Path(__file__).parents[3] / "docs/wire/announcements.md").read_text("utf-8")


@pytest.mark.parametrize("struct", [Announcement, AnnouncementReply, Exchange, ExchangeReply])
def test_the_page_names_every_field(struct: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(struct):
        assert f"`{field.name}`" in PAGE


def test_the_page_names_every_answer_and_every_reason() -> None:
    for word in (*get_args(get_type_hints(AnnouncementReply)["result"]), *RefusalReason):
        assert f"| `{word}` |" in PAGE
    assert f"| `version` | int | {VERSION};" in PAGE
