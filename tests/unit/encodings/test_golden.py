"""Golden encoded blocks: another byte here is another version of the encoding (docs/wire/store.md).

`python -m tests.unit.encodings.test_golden` writes the file anew.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.encodings.interface import ENCODINGS
from baton.kv.layout import KVLayout, LayerLayout

VECTORS = Path(__file__).parents[2] / "vectors" / "encodings" / "blocks.json"
LAYERS = (LayerLayout.gqa(2, 4, v_head_dim=3), LayerLayout.gqa(2, 4, v_head_dim=3))
DTYPES = ("float32", "float16", "bfloat16")


class Vector(msgspec.Struct, frozen=True):
    """One block of `LAYERS`, as it was computed, encoded, and as it is decoded."""

    name: str
    dtype: str
    block: str
    encoded: str
    decoded: str


def make_vector(kind: str, dtype: str) -> Vector:
    layout = KVLayout(LAYERS, 3, dtype)
    encoding = ENCODINGS.build(kind, {})
    codes = np.arange(layout.block_bytes // layout.element_bytes, dtype=np.float32)
    numbers = np.sin(codes * 7) * np.exp2(codes % 5 - 2)
    block = to_bytes(numbers.astype(np.float32), dtype)[None]
    (encoded,) = encoding.encode(layout, block)
    decoded = np.empty_like(block)
    encoding.decode(layout, [encoded], decoded)
    return Vector(
        encoding.name,
        dtype,
        block.tobytes().hex(),
        encoded.tobytes().hex(),
        decoded.tobytes().hex(),
    )


def to_bytes(numbers: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":  # truncated: any numbers will do
        return np.ascontiguousarray(numbers.view(np.uint16)[1::2]).view(np.uint8)
    return numbers.astype(dtype).view(np.uint8)


def load() -> list[Vector]:
    return msgspec.json.decode(VECTORS.read_bytes(), type=list[Vector])


@pytest.mark.parametrize("vector", load(), ids=lambda each: f"{each.name}-{each.dtype}")
def test_golden_vectors(vector: Vector) -> None:
    layout = KVLayout(LAYERS, 3, vector.dtype)
    encoding = ENCODINGS.build(vector.name.partition("/")[0], {})
    assert encoding.name == vector.name
    block, encoded, decoded = (
        np.frombuffer(bytes.fromhex(each), np.uint8)
        for each in (vector.block, vector.encoded, vector.decoded)
    )
    got = np.empty((1, layout.block_bytes), np.uint8)
    encoding.decode(layout, [encoded], got)
    assert got.tobytes() == decoded.tobytes()
    if encoding.grouping != "none":  # another version of Zstandard may compress otherwise
        assert encoding.encode(layout, block[None])[0].tobytes() == encoded.tobytes()


def test_all_encodings_and_dtypes_are_there() -> None:
    names = {ENCODINGS.build(kind, {}).name for kind in ENCODINGS.kinds()}
    assert {(each.name, each.dtype) for each in load()} == {(n, d) for n in names for d in DTYPES}


if __name__ == "__main__":
    vectors = [make_vector(kind, dtype) for kind in ENCODINGS.kinds() for dtype in DTYPES]
    VECTORS.write_bytes(msgspec.json.format(msgspec.json.encode(vectors), indent=1) + b"\n")
