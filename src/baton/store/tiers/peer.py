"""`peer`: memory of other processes: tiers `host` of workers, and of `baton store serve --listen`.

A worker's memory is read only: each keeps what it has computed. A daemon's is written as well.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.errors import ConfigError
from baton.registry import Plugin
from baton.store.peer.client import PeerClient
from baton.store.peer.tier import PeersTier
from baton.store.promotion import PromotionPolicy
from baton.store.remote.tier import RemoteLimits, RemoteTier

if TYPE_CHECKING:
    from baton.store.interface import Tier, TierContext, TierFactory

KIND: Final = "peer"
MAX_PEERS: Final = 32
_NUM_READ_AHEAD: Final = 2


class PeerTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`urls`: `tcp://HOST:PORT` of each peer, as its `store.options.host.listen` has it.

    `timeout_s` and `buffer_bytes` are for each peer. `promote_at_read`: at its so many-th read an
    entry is copied into the worker's first tier.
    """

    urls: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_PEERS)]
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.5
    max_entry_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] = 64 << 20
    buffer_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 << 20
    promote_at_read: Annotated[int, msgspec.Meta(ge=1)] = 2


def open_peers(options: PeerTierOptions, context: TierContext) -> Tier:
    """See `TierFactory`."""
    access = context.peers
    if access is None:
        raise ConfigError("tier peer needs the cluster's credentials: it is opened by workers")
    if len(set(options.urls)) < len(options.urls):
        raise ConfigError("store.options.peer.urls names a peer twice")
    limits = RemoteLimits(
        timeout_s=options.timeout_s,
        max_entry_bytes=options.max_entry_bytes,
        buffer_bytes=options.buffer_bytes,
        num_read_ahead=_NUM_READ_AHEAD,
        num_writers=1,
        promote_at_read=options.promote_at_read,
    )
    clients = [PeerClient(url, access, options.timeout_s) for url in options.urls]
    peers: list[tuple[str, RemoteTier]] = []
    with ExitStack() as opened:
        for url, client in zip(options.urls, clients, strict=True):
            peers.append((url, RemoteTier(KIND, client, limits, context)))
            opened.callback(peers[-1][1].close)
        opened.pop_all()
    if len(peers) == 1:
        return peers[0][1]
    first = secrets.randbelow(len(peers))  # readers spread over the peers that have an entry
    return PeersTier(peers[first:] + peers[:first], PromotionPolicy(options.promote_at_read))


def _build(options: PeerTierOptions) -> TierFactory:
    return partial(open_peers, options)


PLUGIN = Plugin(PeerTierOptions, _build)
