"""Golden block hashes: a change here is a change of the wire format (docs/wire/block-hash.md)."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.errors import ConfigError
from baton.kv.identity import BlockHash, HashDomain, compute_block_hashes, compute_prompt_hash

VECTORS = Path(__file__).parents[2] / "vectors" / "kv" / "block-hash.json"


class Vector(msgspec.Struct, frozen=True):
    """One line of the golden file; hashes are hexadecimal."""

    name: str
    model_fingerprint: str
    tenant_salt: str
    block_size: int
    token_ids: list[int]
    root: str
    block_hashes: list[str]
    prompt_hash: str


def load() -> list[Vector]:
    return msgspec.json.decode(VECTORS.read_bytes(), type=list[Vector])


@pytest.mark.parametrize("vector", load(), ids=lambda v: v.name)
def test_golden_vectors(vector: Vector) -> None:
    domain = HashDomain(vector.model_fingerprint, vector.tenant_salt, vector.block_size)
    token_ids = np.array(vector.token_ids, dtype=np.int32)
    assert domain.root.hex() == vector.root
    assert [h.hex() for h in compute_block_hashes(domain, token_ids)] == vector.block_hashes
    prompt = compute_prompt_hash(vector.model_fingerprint, vector.tenant_salt, token_ids)
    assert prompt.hex() == vector.prompt_hash


def test_the_format_is_the_documented_one() -> None:
    """Written out by hand from docs/wire/block-hash.md."""
    names = b"\x05\0\0\0model\x04\0\0\0salt"
    root = hashlib.sha256(b"baton/block/1" + names + b"\x02\0\0\0").digest()
    first = hashlib.sha256(root + struct.pack("<2i", 7, -1)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 8, 9)).digest()
    token_ids = np.array([7, -1, 8, 9, 10], dtype=np.int32)
    assert compute_block_hashes(HashDomain("model", "salt", 2), token_ids) == [first, second]
    counted = struct.pack("<Q5i", 5, 7, -1, 8, 9, 10)
    prompt = hashlib.sha256(b"baton/prompt/1" + names + counted).digest()
    assert compute_prompt_hash("model", "salt", token_ids) == prompt


def test_fields_cannot_run_into_each_other() -> None:
    assert HashDomain("ab", "c", 16).root != HashDomain("a", "bc", 16).root


def test_strided_and_big_endian_arrays_are_hashed_by_value() -> None:
    domain = HashDomain("m", "s", 2)
    expected = compute_block_hashes(domain, np.array([1, 2, 3, 4], dtype=np.int32))
    strided = np.array([1, 0, 2, 0, 3, 0, 4, 0], dtype=np.int32)[::2]
    assert compute_block_hashes(domain, strided) == expected
    assert compute_block_hashes(domain, np.array([1, 2, 3, 4], dtype=">i4")) == expected


def test_token_ids_that_could_wrap_around_are_refused() -> None:
    with pytest.raises(TypeError):
        compute_block_hashes(HashDomain("m", "s", 1), np.array([2**32 + 1]))
    with pytest.raises(TypeError):
        compute_prompt_hash("m", "s", np.array([2**32 + 1]))


def test_no_full_block_has_no_hash() -> None:
    domain = HashDomain("m", "s", 4)
    assert compute_block_hashes(domain, np.array([1, 2, 3], dtype=np.int32)) == []
    assert compute_block_hashes(domain, np.array([], dtype=np.int32), BlockHash(bytes(32))) == []


@pytest.mark.parametrize("block_size", [0, -1, 65_537])
def test_an_impossible_block_size_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        HashDomain("m", "s", block_size)
