"""A block's hash commits to everything that it says it does, and to nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.kv.identity import HashDomain, compute_block_hashes, compute_prompt_hash
from tests.examples import examples

QUICK = settings(max_examples=examples(50), deadline=None)

names = st.text(max_size=6)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(lambda t: np.array(t, np.int32))
domains = st.builds(HashDomain, names, names, st.integers(1, 9))


@QUICK
@given(domains, tokens, st.integers(0, 40))
def test_a_sequence_may_be_hashed_in_parts(
    domain: HashDomain, token_ids: np.ndarray, cut: int
) -> None:
    whole = compute_block_hashes(domain, token_ids)
    assert len(whole) == len(token_ids) // domain.block_size
    at = min(cut, len(whole)) * domain.block_size
    head = compute_block_hashes(domain, token_ids[:at])
    tail = compute_block_hashes(domain, token_ids[at:], head[-1] if head else None)
    assert head + tail == whole


@QUICK
@given(domains, tokens, st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(
    domain: HashDomain, token_ids: np.ndarray, data: st.DataObject
) -> None:
    before = compute_block_hashes(domain, token_ids)
    assume(before)
    at = data.draw(st.integers(0, len(before) * domain.block_size - 1))
    changed = token_ids.copy()
    changed[at] ^= 1 << data.draw(st.integers(0, 30))
    after = compute_block_hashes(domain, changed)
    block = at // domain.block_size
    assert after[:block] == before[:block]
    assert not set(after[block:]) & set(before)
    assert compute_prompt_hash("m", "s", changed) != compute_prompt_hash("m", "s", token_ids)


@QUICK
@given(domains, domains, tokens)
def test_two_domains_share_no_hash(
    one: HashDomain, other: HashDomain, token_ids: np.ndarray
) -> None:
    assume(one != other)
    assert one.root != other.root
    hashes = [set(compute_block_hashes(domain, token_ids)) for domain in (one, other)]
    assert not hashes[0] & hashes[1]


@QUICK
@given(domains, tokens, st.sampled_from(["model_fingerprint", "tenant_salt"]))
def test_model_and_salt_alone_change_every_hash(
    domain: HashDomain, token_ids: np.ndarray, field: str
) -> None:
    other = replace(domain, **{field: getattr(domain, field) + "x"})
    hashes = zip(
        compute_block_hashes(domain, token_ids),
        compute_block_hashes(other, token_ids),
        strict=True,
    )
    assert all(a != b for a, b in hashes)
    prompt, other_prompt = (
        compute_prompt_hash(d.model_fingerprint, d.tenant_salt, token_ids) for d in (domain, other)
    )
    assert prompt != other_prompt


@QUICK
@given(names, names, tokens, st.integers(0, 2**31 - 1))
def test_the_prompt_hash_of_a_prefix_differs(
    model: str, salt: str, token_ids: np.ndarray, token: int
) -> None:
    longer = np.append(token_ids, np.int32(token))
    assert compute_prompt_hash(model, salt, longer) != compute_prompt_hash(model, salt, token_ids)
