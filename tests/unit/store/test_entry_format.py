"""What an entry holds and how it is named; golden names are a wire format (docs/wire/store.md)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.errors import ConfigError
from baton.kv.identity import HashDomain, compute_block_hashes, compute_tail_hash
from baton.kv.layout import KVLayout, TensorParallelShard
from baton.store.entry_format import (
    HEADER_BYTES,
    EntryFormat,
    has_digest,
    make_header,
    read_header,
)
from baton.store.interface import NO_TENANT, EntryName, TenantLabel

KEY = bytes(range(32))
NONCE = bytes(range(12))
TENANT = TenantLabel(b"tenant-A")
VECTORS = Path(__file__).parents[2] / "vectors" / "store" / "entries.json"
LAYOUT = KVLayout.gqa(3, 4, 8, block_size=16, dtype="float32")


class Vector(msgspec.Struct, frozen=True):
    """One prompt's entries in one form; the record is that of the body `00 01 02 …` of 10 bytes."""

    block_size: int
    num_parts: int
    tenant_salt: str
    token_ids: list[int]
    hashes: list[str]
    names: list[list[str]]
    record: str


def make_vector(block_size: int, num_parts: int, tenant_salt: str, num_tokens: int) -> Vector:
    token_ids = np.arange(num_tokens, dtype=np.int32) * 7
    domain = HashDomain("model", tenant_salt, block_size)
    hashes = compute_block_hashes(domain, token_ids)
    rest = token_ids[len(hashes) * block_size :]
    if len(rest):
        hashes.append(compute_tail_hash(domain, rest, hashes[-1] if hashes else None))
    entry_format = EntryFormat.of(LAYOUT, block_size=block_size, num_parts=num_parts)
    names = [[entry_format.name(each, part).hex() for part in range(num_parts)] for each in hashes]
    body = bytes(range(10))
    name = EntryName(bytes.fromhex(names[0][0]))
    record = make_header(KEY, name, body, NONCE, tenant=TENANT) + body
    return Vector(
        block_size,
        num_parts,
        tenant_salt,
        token_ids.tolist(),
        [each.hex() for each in hashes],
        names,
        record.hex(),
    )


@pytest.mark.parametrize("vector", msgspec.json.decode(VECTORS.read_bytes(), type=list[Vector]))
def test_golden_vectors(vector: Vector) -> None:
    made = make_vector(
        vector.block_size, vector.num_parts, vector.tenant_salt, len(vector.token_ids)
    )
    assert made == vector


def test_no_two_entries_share_a_name() -> None:
    vectors = msgspec.json.decode(VECTORS.read_bytes(), type=list[Vector])
    names = [name for vector in vectors for parts in vector.names for name in parts]
    assert len(names) == len(set(names)) > 10


def test_engines_that_differ_name_entries_alike() -> None:
    entry_format = EntryFormat.of(LAYOUT, block_size=64, num_parts=2)
    for changes in (
        {"block_size": 24},
        {"order": "heads_first"},
        {"order": "opaque", "arrangement": "vllm-cpu/vec/LBHNC"},
        {"shard": TensorParallelShard(1, 2)},
    ):
        other = msgspec.structs.replace(LAYOUT, **changes)
        assert EntryFormat.of(other, block_size=64, num_parts=2) == entry_format


def test_another_dtype_or_shape_is_another_form() -> None:
    block_hash = compute_block_hashes(HashDomain("m", "", 64), np.arange(64, dtype=np.int32))[0]
    layouts = [
        LAYOUT,
        msgspec.structs.replace(LAYOUT, dtype="bfloat16"),
        KVLayout.gqa(3, 4, 4, block_size=16, dtype="float32"),
        KVLayout.gqa(2, 4, 8, block_size=16, dtype="float32"),
    ]
    forms = [EntryFormat.of(layout, block_size=64, num_parts=1) for layout in layouts]
    forms.append(EntryFormat.of(LAYOUT, block_size=64, num_parts=2))
    assert len({entry_format.name(block_hash, 0) for entry_format in forms}) == len(forms)


def test_encodings_are_part_of_the_name() -> None:
    """Golden: docs/wire/store.md. Without any, names are those of before there were encodings."""
    block_hash = compute_block_hashes(HashDomain("m", "", 64), np.arange(64, dtype=np.int32))[0]
    names = {}
    for encodings in (
        (),
        ("store=int8/1",),
        ("handoff=int8/1",),
        ("store=int8/1", "handoff=fp8/1"),
    ):
        form = EntryFormat.of(LAYOUT, block_size=64, num_parts=1, encodings=encodings)
        names[encodings] = form.name(block_hash, 0)
        text = ",".join(encodings).encode()
        fingerprint = bytes.fromhex(form.part_layout(0).fingerprint())
        tag = b"baton/entry/2" + bytes([len(text)]) + text if text else b"baton/entry/1"
        assert names[encodings] == hashlib.sha256(tag + fingerprint + block_hash).digest()
    assert len(set(names.values())) == len(names)


def test_parts_are_shared_among_ranks() -> None:
    entry_format = EntryFormat.of(LAYOUT, block_size=64, num_parts=4)
    assert entry_format.parts_of_shard(TensorParallelShard()) == range(4)
    assert entry_format.parts_of_shard(TensorParallelShard(1, 2)) == range(2, 4)
    assert (
        sum(entry_format.body_bytes(part, 10) for part in range(4)) == LAYOUT.bytes_per_token * 10
    )


def test_parts_that_ranks_cannot_hold_whole_are_refused() -> None:
    sharded = msgspec.structs.replace(LAYOUT, shard=TensorParallelShard(0, 4))
    with pytest.raises(ConfigError, match=r"store\.num_parts"):
        EntryFormat.of(sharded, block_size=64, num_parts=2)
    with pytest.raises(ConfigError, match="divided"):
        EntryFormat.of(LAYOUT, block_size=64, num_parts=3)


def test_the_tag_is_that_of_an_empty_message_of_aes_gcm() -> None:
    """Another implementation of the same: its additional data are all that is authenticated."""
    name, body = EntryName(b"n" * 32), bytes(range(200))
    header = make_header(KEY, name, body, NONCE, tenant=TENANT)
    data = name + TENANT + bytes(8) + len(body).to_bytes(8, "little") + body
    assert header[40:52] == NONCE
    assert header[52:68] == AESGCM(KEY).encrypt(NONCE, b"", data)
    assert make_header(KEY, name, body)[40:52] != make_header(KEY, name, body)[40:52]


def test_a_compressed_body_states_how_long_it_was() -> None:
    name, body = EntryName(b"n" * 32), b"body"
    for whole_bytes, is_possible in ((0, True), (64 * 4, True), (64 * 4 + 1, False)):
        raw = make_header(KEY, name, body, whole_bytes=whole_bytes)
        header = read_header(name, raw, HEADER_BYTES + 4)
        assert (header is not None) == is_possible
        if header is not None:
            assert header.whole_bytes == whole_bytes
            assert has_digest(KEY, header, body)


def test_a_record_says_what_it_is() -> None:
    name, other = EntryName(b"n" * 32), EntryName(b"o" * 32)
    body = b"body"
    raw = make_header(KEY, name, body, tenant=TENANT)
    header = read_header(name, raw, HEADER_BYTES + 4)
    assert header is not None
    assert (header.tenant, header.num_bytes) == (TENANT, 4)
    assert has_digest(KEY, header, body)
    assert not has_digest(KEY, header, b"bodz")
    assert not has_digest(KEY, header, body + b"!")
    assert not has_digest(KEY, replace(header, name=other), body), "an entry that was renamed"
    assert not has_digest(KEY, replace(header, tenant=NO_TENANT), body), "given to another tenant"
    assert not has_digest(bytes(32), header, body), "who wrote it had another key"
    assert read_header(other, raw, HEADER_BYTES + 4) is None
    assert read_header(name, raw, HEADER_BYTES + 3) is None
    assert read_header(name, raw[:-1], HEADER_BYTES + 4) is None
    assert not has_digest(KEY, replace(header, whole_bytes=8), body), "said to be compressed"
    older = b"BATONKV3" + raw[8:]
    assert read_header(name, older, HEADER_BYTES + 4) is None
