"""docs/wire/worker-http.md and `baton.protocol` name the same paths, headers and fields."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from baton.ids import TicketId
from baton.protocol import worker_http
from baton.protocol.worker_http import (
    AbortOrder,
    ErrorDetail,
    FirstToken,
    Health,
    KVEventsSource,
    NextTokens,
    PrefillReply,
    WorkerInfo,
    WorkerLoad,
    abort_path,
    first_token_path,
    standby_path,
    trace_path,
)

PAGE = (Path(__file__).parents[3] / "docs/wire/worker-http.md").read_text()
TICKET = "{ticket id, 32 hex digits}"
TEMPLATES = {
    trace_path("R").removesuffix("R") + "{request_id}",
    worker_http.KV_EVENTS_PREFIX + "{number}",
    abort_path(TicketId(b"\0" * 16)).replace("00" * 16, TICKET),
    first_token_path(TicketId(b"\0" * 16)).replace("00" * 16, TICKET),
    standby_path("{id, 32 hex digits}"),
}
PATHS = TEMPLATES | {value for name, value in vars(worker_http).items() if name.endswith("_PATH")}


def names(schema: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(schema)}


def names_in(pattern: str) -> set[str]:
    """The words between the braces that `pattern` captures, types and values left out."""
    match = re.search(pattern, PAGE, re.DOTALL)
    assert match is not None, pattern
    text = re.sub(r"\{[^{}]*\}|\[[^\]]*\]", "", match[1])
    return set(re.findall(r'"?(\w+)"?(?=\s*(?::|,|$))', re.sub(r":[^,]*", ":", text)))


def test_each_path_is_in_the_pages_first_table_and_the_other_way_round():
    table = PAGE.split("| method, path |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    listed = {path for cell in cells for path in re.findall(r"(/[^`]+)`", cell)}
    assert listed == PATHS


def test_each_header_is_on_the_page_and_the_other_way_round():
    headers = {value for name, value in vars(worker_http).items() if name.endswith("_HEADER")}
    assert set(re.findall(r"`(x-[a-z-]+)`", PAGE)) == headers


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        (WorkerInfo, r"WorkerInfo = \{(.*?)\}\n```"),
        (KVEventsSource, r"kv_events: \{(.*?)\}"),
        (WorkerLoad, r'"load": \{(.*?)\}'),
        (ErrorDetail, r'\{"error":\{("message".*?)\}'),
        (AbortOrder, r"abort` \| body `\{(.*?)\}`"),
        (NextTokens, r"\{(\"start\".*?)\}  →  204"),
        (FirstToken, r"further field `first`: `\{(.*?)\}`,"),
    ],
)
def test_each_field_is_on_the_page_and_the_other_way_round(
    schema: type[msgspec.Struct], pattern: str
):
    assert names_in(pattern) == names(schema)


def test_the_fields_of_health_and_of_a_prefill_reply_are_on_the_page():
    for field in names(Health):
        assert f'"{field}":' in PAGE, field
    reply = re.search(r'\{("object":"baton\.prefill".*?)\}`', PAGE)
    assert reply is not None
    assert set(re.findall(r'"(\w+)":', reply[1])) | {"first"} == names(PrefillReply)
