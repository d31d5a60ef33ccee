"""Which encodings a worker's entries are named by."""

from __future__ import annotations

import pytest

from baton.encodings.interface import ENCODINGS
from baton.handoff.encoded_view import list_lossy
from baton.handoff.pool_mode.store_access import name_encodings


@pytest.mark.parametrize(
    ("store", "handoff", "names"),
    [
        ("raw", (), ()),
        ("zstd", (), ("store=zstd/1",)),
        ("int8", (), ("store=int8/1",)),
        ("raw", ("int8",), ("handoff=int8/1",)),
        ("int4", ("fp8",), ("store=int4/1", "handoff=fp8/1")),
        ("raw", ("zstd", "int8", "fp8"), ("handoff=fp8/1", "handoff=int8/1")),
    ],
)
def test_entries_are_named_by_what_their_kv_may_have_gone_through(
    store: str, handoff: tuple[str, ...], names: tuple[str, ...]
) -> None:
    received = [ENCODINGS.build(kind, {}) for kind in handoff]
    assert name_encodings(ENCODINGS.build(store, {}), received) == names


def test_exact_encodings_are_not_stated_to_peers() -> None:
    built = {kind: ENCODINGS.build(kind, {}) for kind in ("raw", "zstd", "int8", "fp8")}
    assert list_lossy((built["raw"], built["zstd"])) == {}
    assert list_lossy((built["int8"], built["fp8"], built["int8"])) == {
        "kv_encodings": "fp8/1,int8/1"
    }
