"""Which peer keeps an entry: all agree, and few entries move where a peer comes or goes."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from baton.store.interface import EntryName
from baton.store.peer.owners import choose_owner

names = {each: EntryName(hashlib.sha256(each.encode()).digest()) for each in "abcdef"}
URLS = st.lists(st.integers(0, 99).map("tcp://10.0.0.{}:8010".format), unique=True, max_size=8)


@given(URLS, st.randoms(), st.binary(min_size=32, max_size=32))
def test_the_order_of_peers_does_not_matter_and_losing_one_moves_its_entries_only(
    urls: list[str], chance, raw: bytes
) -> None:
    name = EntryName(raw)
    owner = choose_owner(name, urls)
    if not urls:
        assert owner is None
        return
    assert owner is not None
    shuffled = chance.sample(urls, len(urls))
    again = choose_owner(name, shuffled)
    assert again is not None
    assert shuffled[again] == urls[owner]
    lost = chance.choice(urls)
    left = [url for url in urls if url != lost]
    if lost != urls[owner]:
        now = choose_owner(name, left)
        assert now is not None
        assert left[now] == urls[owner]


def test_entries_are_spread_evenly() -> None:
    urls = [f"tcp://10.0.0.{n}:8010" for n in range(4)]
    kept = [0] * 4
    for n in range(4000):
        owner = choose_owner(EntryName(hashlib.sha256(b"%d" % n).digest()), urls)
        assert owner is not None
        kept[owner] += 1
    assert min(kept) > 900
    assert max(kept) < 1100
