"""Which encodings a worker's entries are named by, and which it states to peers."""

from __future__ import annotations

from contextlib import closing, nullcontext

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.config.sections import StoreSection
from baton.encodings.interface import ENCODINGS
from baton.handoff.kv_views import KVView
from baton.handoff.pool_mode.store_access import list_lossy, name_encodings, open_store_access
from baton.kv.layout import KVLayout
from baton.testing.clocks import ManualClock
from baton.transfer.region import allocate_host_region, release_region

KEY = Credentials.of(ClusterKey(b"k" * 32))


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


@pytest.mark.parametrize(
    ("tiers", "prefixes", "store", "handoff", "of_receiver", "of_others"),
    [
        ((), False, "raw", (), "", ""),
        ((), False, "raw", ("int8",), "int8/1", ""),
        ((), False, "raw", ("zstd", "int8", "fp8", "int8"), "fp8/1,int8/1", ""),
        (("host",), True, "raw", (), "", ""),
        (("host",), True, "zstd", ("zstd",), "", ""),
        (("host",), True, "fp8", (), "fp8/1", "fp8/1"),
        # A name is that of KV which decode workers received, too: who loads it may have it.
        (("host",), True, "raw", ("int8",), "int8/1", "int8/1"),
        (("host",), True, "fp8", ("int8",), "fp8/1,int8/1", "fp8/1,int8/1"),
        (("host",), False, "raw", ("int8",), "int8/1", ""),
        (("host",), False, "fp8", ("int8",), "fp8/1,int8/1", "fp8/1"),
    ],
)
def test_peers_are_told_what_kv_that_was_received_or_loaded_may_have_lost(
    tiers: tuple[str, ...],
    store: str,
    handoff: tuple[str, ...],
    of_receiver: str,
    of_others: str,
    *,
    prefixes: bool,
) -> None:
    layout = KVLayout.gqa(1, 2, 8, block_size=64, dtype="float32")
    region = allocate_host_region([(1, layout.page_bytes(0))])
    encodings = [ENCODINGS.build(kind, {}) for kind in handoff]
    access = open_store_access(
        StoreSection(tiers=tiers, encoding=store),
        KVView(layout, region),
        key=KEY.key,
        clock=ManualClock(),
        keeps_prefixes=prefixes,
        handoff_encodings=encodings,
    )
    with nullcontext() if access is None else closing(access.store):
        for receives, names in ((True, of_receiver), (False, of_others)):
            stated = list_lossy(encodings, access, receives=receives)
            assert stated == ({"kv_encodings": names} if names else {})
    release_region(region)
