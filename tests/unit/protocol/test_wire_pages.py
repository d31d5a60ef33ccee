"""The pages under docs/wire name the versions, messages and fields that the code sends."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import msgspec
import pytest

import baton.transfer
from baton.auth.ticket import Ticket, WorkerRef
from baton.handoff import messages
from baton.handoff.messages import PROTOCOL_VERSION
from baton.handoff.pool_mode.side_entries import CompletionMarker, HeartbeatEntry
from baton.net.framing import MAGIC
from baton.store.peer import wire as store_peers

ROOT = Path(__file__).parents[3]
WIRE = ROOT / "docs/wire"
HANDOFF, TRANSFER = ((WIRE / name).read_text() for name in ("handoff.md", "transfer.md"))


def names_in(text: str) -> list[str]:
    """Identifiers in code spans, without their types, bounds and values."""
    spans = re.findall(r"`([^`]+)`", text)
    return [match[0] for span in spans if (match := re.match(r"[a-z_]+", span))]


def fields_of(struct: type) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(struct)}


def structs_in(module: object) -> list[type]:
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__module__ == module.__name__  # type: ignore[attr-defined]
    ]


def tags_of(struct: type) -> set[str]:
    tag = struct.__struct_config__.tag  # type: ignore[attr-defined]
    return {tag} if isinstance(tag, str) else set()


def read_handoff_rows() -> dict[str, set[str]]:
    """Tag → fields, of the page's table; a row of two messages separates their fields by `;`."""
    rows: dict[str, set[str]] = {}
    table = HANDOFF.partition("| `t` | from |")[2]
    for tags, fields in re.findall(r"^\| (`[a-z_`, ]+`) \| \w+ \| ([^|]+) \|", table, re.MULTILINE):
        named = names_in(tags)
        parts = fields.split(";") if ";" in fields else [fields] * len(named)
        for tag, part in zip(named, parts, strict=True):
            rows[tag] = set(names_in(re.sub(r"\([^)]*\)", "", part)))
    return rows


HANDOFF_STRUCTS = {
    tag: struct
    for struct in structs_in(messages)
    for tag in tags_of(struct)
    if not struct.__name__.startswith("_") and struct is not messages.UnsupportedHello
    if not struct.__subclasses__()  # it says who a message is for
}


def test_the_handoff_page_names_the_version_of_hello():
    assert re.findall(r"`version`=(\d+)", HANDOFF) == [str(PROTOCOL_VERSION)]


def test_the_transfer_page_names_the_version_of_the_handshake():
    assert re.findall(r"^Version (\d+)\.", TRANSFER, re.MULTILINE) == [str(MAGIC[-1])]
    assert f'"BATON" {MAGIC[-1]:02}' in TRANSFER


def test_the_handoff_page_has_every_message_and_no_other():
    assert set(read_handoff_rows()) == set(HANDOFF_STRUCTS)
    assert len(HANDOFF_STRUCTS) > 20


@pytest.mark.parametrize("tag", sorted(HANDOFF_STRUCTS))
def test_the_handoff_page_has_every_field_of_a_message(tag):
    assert read_handoff_rows()[tag] == fields_of(HANDOFF_STRUCTS[tag])


def transfer_structs() -> list[type]:
    """Every tagged message of the transports."""
    names = [
        info.name for info in pkgutil.walk_packages(baton.transfer.__path__, "baton.transfer.")
    ]
    wire = [
        name for name in names if name.rpartition(".")[2] in {"wire", "messages", "grant_messages"}
    ]
    found = [struct for name in wire for struct in structs_in(importlib.import_module(name))]
    return [struct for struct in found if tags_of(struct)]


def read_transfer_messages() -> dict[str, set[str]]:
    """Type → fields, of all `{type: "…", …}` of the page."""
    rows: dict[str, set[str]] = {}
    for tag, rest in re.findall(r'\{type: "(\w+)"([^}]*)\}', TRANSFER):
        fields = re.findall(r"(?:^|, )(\w+)", re.sub(r"\[[^\]]*\]", "", rest))
        rows.setdefault(tag, set()).update(fields)
    return rows


def test_the_transfer_page_has_every_message_and_no_other():
    assert set(read_transfer_messages()) == {
        tag for struct in transfer_structs() for tag in tags_of(struct)
    }


def test_the_transfer_page_has_every_field():
    """Those of one transport alone are named in its own section."""
    documented = read_transfer_messages()
    sent: dict[str, set[str]] = {}
    for struct in transfer_structs():
        for tag in tags_of(struct):
            sent.setdefault(tag, set()).update(fields_of(struct))
    for tag, fields in sent.items():
        assert documented[tag] <= fields, tag
        assert fields - documented[tag] <= set(names_in(TRANSFER)), tag


def test_the_stores_page_has_every_message_between_peers():
    page = (WIRE / "store.md").read_text().partition("## Between peers")[2].partition("\n## ")[0]
    named = set(names_in(page))
    for struct in structs_in(store_peers):
        assert tags_of(struct) | fields_of(struct) <= named, struct


def test_the_pages_of_tickets_and_of_the_store_name_every_field():
    ticket, store = ((WIRE / name).read_text() for name in ("ticket.md", "store.md"))
    rows = {
        name
        for row in re.findall(r"^\| (`[^|]+) \|", ticket, re.MULTILINE)
        for name in names_in(row)
    }
    assert rows >= fields_of(Ticket) | {"t"}
    assert "{" + ", ".join(WorkerRef.__struct_fields__) + "}" in ticket
    for struct in (CompletionMarker, HeartbeatEntry):
        assert all(f'"{name}":' in store for name in fields_of(struct))


def test_modules_and_files_that_the_pages_name_exist():
    groups = set(re.findall(r'"(baton\.\w+)"', (ROOT / "pyproject.toml").read_text()))
    for page in [*ROOT.glob("docs/*.md"), *WIRE.glob("*.md"), ROOT / "README.md"]:
        text = page.read_text()
        for name in set(re.findall(r"`(baton(?:\.[a-z_]+)+)`", text)) - groups:
            assert find_module(name), (page.name, name)
        for name in re.findall(r"`((?:src/baton|tests|benchmarks|scripts)/[\w/.]+\.py)", text):
            assert (ROOT / name).exists(), (page.name, name)


def find_module(name: str) -> bool:
    path = ROOT.joinpath("src", *name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()
