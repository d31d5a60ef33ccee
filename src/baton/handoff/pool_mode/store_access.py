"""What a worker takes part in mode pool with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from baton.encodings.error_budget import check_is_alone, find_smallest
from baton.encodings.interface import RAW, KVEncoding, open_encoding
from baton.encodings.raw import RawEncoding
from baton.events.wire import NAMING_BYTES
from baton.handoff.encoded_view import LOSSY_TRAIT
from baton.handoff.pool_mode.store_journal import StoreJournal, open_store_journal
from baton.store.entry_format import EntryFormat
from baton.store.interface import TENANT_BYTES, EntryName, PeerAccess, TenantLabel
from baton.store.tiered import TieredStore, TierRun, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from baton.auth.key import ClusterKey
    from baton.clock import Clock
    from baton.config.sections import StoreSection
    from baton.events.journal import CacheJournal
    from baton.handoff.kv_views import KVView
    from baton.kv.layout import KVLayout
    from baton.telemetry.trace import RequestSpan


@dataclass(slots=True)
class EntryCounts:
    """Entries of handoffs that ended or go on. Owner: the pool's thread; others read.

    Of prefills: `num_kept` were put, `num_known` were in the store already. Of decodes: `num_taken`
    came, `num_missing` had not when their handoff ended, and were computed.
    """

    num_stored: int = 0
    num_present: int = 0
    num_loaded: int = 0
    num_missing: int = 0


@dataclass(slots=True)
class EncodingCounts:
    """Of KV that was encoded, or decoded: bytes as computed, as encoded, and the time.

    Owner: the pool's thread; others read.
    """

    raw_bytes: int = 0
    encoded_bytes: int = 0
    seconds: float = 0.0

    def add(self, raw_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """Some more."""
        self.raw_bytes += raw_bytes
        self.encoded_bytes += encoded_bytes
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The store belongs to the pool's thread, which closes it; so do the staging pages of `view`.

    The KV view shows the engine's blocks in an order that can be divided into tokens and heads.
    `encoding` writes the bodies of entries. `label_tenant` gives the label of a tenant's salt.
    `naming`: the secret of the names by which gateways know entries. `keeps_prefixes`: what engines
    compute is kept, and looked for before it is computed; while they compute, for `keep_share` of
    the time, and as `StoreSection.admission` has it. What is kept is reported to gateways by way of
    `journal`, if there is one.
    """

    store: TieredStore
    entry_format: EntryFormat
    view: KVView
    label_tenant: Callable[[str], TenantLabel]
    encoding: KVEncoding = field(default_factory=RawEncoding)
    keeps_prefixes: bool = False
    keep_share: float = 1.0
    admission: Literal["always", "second"] = "always"
    journal: StoreJournal | None = None
    counts: EntryCounts = field(default_factory=EntryCounts)
    encoded: EncodingCounts = field(default_factory=EncodingCounts)
    decoded: EncodingCounts = field(default_factory=EncodingCounts)
    naming: bytes = b""


_PURPOSE: Final = "store"
_TENANT_TAG: Final = b"tenant/1"
_NAMING_TAG: Final = b"prefix-names/1"
_NAME_CHARS: Final = 16


def open_store_access(  # noqa: PLR0913 - what a worker's store is opened from
    section: StoreSection,
    view: KVView,
    *,
    key: ClusterKey,
    clock: Clock,
    keeps_prefixes: bool = False,
    handoff_encodings: Sequence[KVEncoding] = (),
    peers: PeerAccess | None = None,
) -> StoreAccess | None:
    """Open the store; None where no tier is configured. `keeps_prefixes`: see `StoreAccess`.

    `handoff_encodings`: workers of this store receive KV that was encoded so. `peers`: see
    `TierContext`.

    Raises:
        ConfigError: a tier cannot be opened, or this worker's heads cannot be divided so.
    """
    if not section.tiers:
        return None
    entry_format = EntryFormat.of(
        view.layout, block_size=section.block_size, num_parts=section.num_parts
    )
    encoding = _open_encoding(section, entry_format.full_layout)
    entry_format = replace(entry_format, encodings=name_encodings(encoding, handoff_encodings))
    store = open_keyed_store(section.tiers, section.options, key=key, clock=clock, peers=peers)
    label = partial(label_tenant, key)
    naming = key.sign(_PURPOSE, _NAMING_TAG)[:NAMING_BYTES]
    return StoreAccess(
        store,
        entry_format,
        view,
        label,
        encoding,
        keeps_prefixes,
        section.keep_share,
        section.admission,
        naming=naming,
    )


def find_pieces(store: TieredStore, names: Sequence[EntryName], num_parts: int) -> list[TierRun]:
    """Leading pieces of a prompt of which every part is there, by the tier of its last part.

    `names`: `num_parts` for each piece.
    """
    runs: list[TierRun] = []
    num_names = num_pieces = 0
    for tier, num in store.find_runs(names):
        num_names += num
        more = num_names // num_parts - num_pieces
        if more:
            runs.append(TierRun(tier, more))
            num_pieces += more
    return runs


def label_tenant(key: ClusterKey, tenant_salt: str) -> TenantLabel:
    """The label of a tenant's entries: without the cluster's key it does not show the salt."""
    return TenantLabel(key.sign(_PURPOSE, _TENANT_TAG + tenant_salt.encode())[:TENANT_BYTES])


def note_store_encoding(trace: RequestSpan, encoding: KVEncoding) -> None:
    """Write into a request's trace that its KV went through entries that are encoded."""
    if encoding.name != RAW:
        trace.note_encoding(f"store={encoding.name}")


def _open_encoding(section: StoreSection, full_layout: KVLayout) -> KVEncoding:
    if section.error_budget is None:
        return open_encoding(section.encoding, full_layout, "store.encoding")
    check_is_alone("store", section.encoding)
    return find_smallest(section.error_budget, full_layout)


def name_encodings(store: KVEncoding, handoff: Iterable[KVEncoding]) -> tuple[str, ...]:
    """See `EntryFormat.encodings`. Raw entries of exact KV keep the names that they always had."""
    names = [] if store.name == RAW else [f"store={store.name}"]
    names += sorted(f"handoff={each.name}" for each in handoff if not each.is_exact)
    return tuple(names)


def list_lossy(
    handoff: Sequence[KVEncoding], access: StoreAccess | None, *, receives: bool
) -> dict[str, str]:
    """The trait of a worker whose KV may have lost something to encodings; none where it is exact.

    `handoff`: those of its handoffs. A worker that `receives` none may load prefixes which others
    received so, as entries of both have the same names.
    """
    stored = () if access is None else (access.encoding,)
    loads = access is not None and access.keeps_prefixes
    used = (*handoff, *stored) if receives or loads else stored
    names = {each.name for each in used if not each.is_exact}
    return {LOSSY_TRAIT: ",".join(sorted(names))} if names else {}


def report_to(
    journal: CacheJournal, access: StoreAccess | None, *, fingerprint: str, clock: Clock
) -> StoreAccess | None:
    """With what is kept for models of `fingerprint` reported to `journal`, if anything is."""
    if access is None or not access.keeps_prefixes:
        return access
    reported = open_store_journal(
        access.store,
        access.entry_format,
        journal,
        naming=access.naming,
        fingerprint=fingerprint,
        clock=clock,
    )
    return replace(access, journal=reported)


def open_keyed_store(
    kinds: Sequence[str],
    options: Mapping[str, Mapping[str, object]],
    *,
    key: ClusterKey,
    clock: Clock,
    may_create: bool = True,
    peers: PeerAccess | None = None,
) -> TieredStore:
    """The store of a cluster: its key names the folders of tiers, and its entries' digests.

    `may_create`, `peers`: see `TierContext`.

    Raises:
        ConfigError: a tier cannot be opened.
    """
    names = key.sign(_PURPOSE, b"name").hex()
    cluster, *others = (names[at : at + _NAME_CHARS] for at in range(0, len(names), _NAME_CHARS))
    return open_store(
        kinds,
        options,
        cluster=cluster,
        key=key.sign(_PURPOSE, b"entries"),
        clock=clock,
        other_names=tuple(others),
        may_create=may_create,
        peers=peers,
    )
