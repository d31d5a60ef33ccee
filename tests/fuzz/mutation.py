"""Damaged inputs: bytes with other bytes in them, and well-formed messages with wrong values.

Everything is drawn from one `random.Random`, so that a seed gives the same inputs again.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

Form: TypeAlias = Literal["bytes", "text", "json", "msgpack"]
"""What an input is, and so which wrong values can be put into it."""

MAX_INPUT_BYTES: Final = 64 * 1024
NUM_MANY: Final = 1500
"""Copies of an element, where a list is made long."""
DEPTH: Final = 3000

BOUNDARIES: Final = tuple(
    sorted({
        value
        for power in (0, 1, 4, 7, 8, 10, 12, 15, 16, 20, 22, 24, 31, 32, 46, 62, 63, 64)
        for value in ((1 << power) - 1, 1 << power, (1 << power) + 1, -(1 << power))
        if -(1 << 63) <= value < 1 << 64
    })
)
FLOATS: Final = (
    0.0, -0.0, 0.5, -1.0, 1e-320, 1e18, 1e308, -1e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
TEXTS: Final = (
    "", " ", "a", "0", "-1", "1e999", "nan", "true", "a" * 17, "0" * 32, "f" * 65, "a" * 5000,
    "\0", "\n", "\r\n\r\n", "é", "\U0001f600", "\u202e", "\ufeff", "../../etc/passwd", "/", "%s%n",
    "127.0.0.1:1", "[::1]:65536", "http://127.0.0.1:1", "tcp://*:1", "ipc://x", "shared", "tcp",
)  # fmt: skip
BLOBS: Final = (b"", b"\0", b"\0" * 15, b"\0" * 16, b"\xff" * 16, b"\0" * 17, b"\xff" * 32)
TOKENS: Final = (
    # Lengths that nothing follows, and bytes that are no text, in msgpack.
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1", b"\xc0",
    b"\xdb\xff\xff\xff\xff", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xa2\xff\xfe", b"\xc7\xff\xff", b"\xd6\xff\0\0\0\0", b"\x91" * 64, b"\x81\xa1x" * 32,
    # And in JSON and other texts.
    b"null", b"NaN", b"-1", b"1e999", b"[[[[[[[[", b'{"a":' * 16, b"\\ud800", b"\\u0000",
    b"\xff\xfe",
    b'"', b",", b"}", b"]", b"true", b"9" * 400, b"\xed\xa0\x80", b"\r\n", b"\n", b"= [", b"inf",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """One value inside a tree, by the keys that lead to it."""

    path: tuple[Any, ...]
    value: Any


class Tree:
    """A decoded message, to be encoded again with something wrong in it."""

    def __init__(self, form: Form, root: object) -> None:
        self.form, self.root = form, root
        self.places: list[Place] = []
        self._list_places((), root)

    @classmethod
    def read(cls, form: Form, data: bytes) -> Tree | None:
        """None where the bytes are no such message, or one with nothing in it."""
        try:
            root = msgspec.msgpack.decode(data) if form == "msgpack" else json.loads(data)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return None
        return cls(form, root) if isinstance(root, dict | list) else None

    def _list_places(self, path: tuple[Any, ...], value: object) -> None:
        self.places.append(Place(path, value))
        if len(self.places) > 400:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                self._list_places((*path, key), inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value[:24]):
                self._list_places((*path, index), inner)


def mutate(rng: Random, form: Form, pool: Sequence[bytes], trees: Sequence[Tree]) -> bytes:
    """One input of those, changed once or a few times."""
    if trees and rng.random() < 0.6:
        data = _change_tree(rng, rng.choice(trees), trees)
        if rng.random() < 0.85:
            return data[:MAX_INPUT_BYTES]
    else:
        data = rng.choice(pool)
    for _ in range(1 + int(rng.expovariate(0.8))):
        data = _change_bytes(rng, data, pool)
    return data[:MAX_INPUT_BYTES]


def _change_bytes(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    size = len(data)
    at = rng.randrange(size + 1)
    match rng.randrange(10):
        case 0 if size:  # flip a bit
            at %= size
            return data[:at] + bytes((data[at] ^ (1 << rng.randrange(8)),)) + data[at + 1 :]
        case 1 if size:
            at %= size
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        case 2:
            return data[:at]
        case 3:  # take a part out
            return data[:at] + data[at + 1 + int(rng.expovariate(0.1)) :]
        case 4:  # a part twice, or many times
            part = data[at : at + 1 + int(rng.expovariate(0.1))]
            return data[:at] + part * rng.choice((2, 2, 3, 100)) + data[at:]
        case 5 | 6:
            width = rng.choice((1, 2, 4, 4, 8))
            number = rng.choice(BOUNDARIES) % (1 << (8 * width))
            packed = number.to_bytes(width, rng.choice(("little", "big")))
            return data[:at] + packed + data[at + (width if rng.random() < 0.8 else 0) :]
        case 7:
            token = rng.choice(TOKENS)
            return data[:at] + token + data[at + rng.choice((0, 0, 1, len(token))) :]
        case 8:  # the beginning of one, the end of another
            other = rng.choice(pool)
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case _:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def _change_tree(rng: Random, tree: Tree, trees: Sequence[Tree]) -> bytes:
    root = tree.root
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.choice(tree.places)
        try:
            root = _replaced(root, place.path, _wrong(rng, place.value, trees))
        except (KeyError, IndexError, TypeError):  # an earlier change took the place away
            continue
    return _encode(rng, tree.form, root)


def _encode(rng: Random, form: Form, root: object) -> bytes:
    try:
        if form == "msgpack":
            return msgspec.msgpack.encode(root)
        return json.dumps(root, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return b""


_GONE: Final = object()


def _replaced(root: Any, path: tuple[Any, ...], value: object) -> Any:
    if not path:
        return root if value is _GONE else value
    key, *rest = path
    changed = dict(root) if isinstance(root, dict) else list(root)
    if not rest and value is _GONE:
        del changed[key]
    else:
        changed[key] = _replaced(root[key], tuple(rest), value)
    return changed


def _wrong(rng: Random, value: Any, trees: Sequence[Tree]) -> object:
    """Another value: of the same type, most often."""
    if rng.random() < 0.15:
        return _GONE
    if rng.random() < 0.3:
        return _anything(rng, trees)
    match value:
        case bool():
            return not value
        case int():
            near = value + rng.choice((-1, 1, 2, 255))
            return rng.choice((near, -value, rng.choice(BOUNDARIES), rng.choice(BOUNDARIES)))
        case float():
            return rng.choice((*FLOATS, -value, value * 1e9))
        case str():
            return _wrong_text(rng, value, trees)
        case bytes():
            return _wrong_blob(rng, value, trees)
        case dict():
            return _wrong_map(rng, value, trees)
        case list() | tuple():
            return _wrong_list(rng, list(value), trees)
        case _:
            return _anything(rng, trees)


def _anything(rng: Random, trees: Sequence[Tree]) -> object:
    match rng.randrange(9):
        case 0:
            return None
        case 1:
            return rng.choice((True, False))
        case 2:
            return rng.choice(BOUNDARIES)
        case 3:
            return rng.choice(FLOATS)
        case 4:
            return rng.choice(TEXTS)
        case 5:
            blob = rng.choice(BLOBS)
            return blob if trees[0].form == "msgpack" else blob.decode("latin-1")
        case 6:
            return rng.choice(([], {}, [None], {"": None}, [[]], {"type": "text"}))
        case 7:
            return _nested(rng)
        case _:
            return rng.choice(rng.choice(trees).places).value


def _nested(rng: Random) -> object:
    value: object = rng.choice((None, 0, ""))
    wrap = rng.choice((lambda v: [v], lambda v: {"a": v}))
    for _ in range(rng.choice((2, 20, 200))):
        value = wrap(value)
    return value


def _wrong_text(rng: Random, value: str, trees: Sequence[Tree]) -> str:
    match rng.randrange(5):
        case 0:
            return rng.choice(TEXTS)
        case 1:
            return value[: rng.randrange(len(value) + 1)]
        case 2:
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice(TEXTS) + value[at:]
        case 3:
            return value * rng.choice((2, 100))
        case _:
            other = rng.choice(rng.choice(trees).places).value
            return other if isinstance(other, str) else value.swapcase()


def _wrong_blob(rng: Random, value: bytes, trees: Sequence[Tree]) -> bytes:
    match rng.randrange(4):
        case 0:
            return rng.choice(BLOBS)
        case 1:
            other = rng.choice(rng.choice(trees).places).value
            return other if isinstance(other, bytes) else value[::-1]
        case 2:
            width = rng.choice((4, 8))
            packed = (rng.choice(BOUNDARIES) % (1 << (8 * width))).to_bytes(width, "little")
            at = rng.randrange(len(value) // width + 1) * width
            return value[:at] + packed + value[at + width :]
        case _:
            return _change_bytes(rng, value, (value,))


def _wrong_map(rng: Random, value: dict[Any, Any], trees: Sequence[Tree]) -> dict[Any, Any]:
    changed = dict(value)
    match rng.randrange(3):
        case 0:
            changed[rng.choice(TEXTS)] = _anything(rng, trees)
        case 1 if value:
            changed[rng.choice(list(value))] = _anything(rng, trees)
        case _:
            other = rng.choice(rng.choice(trees).places).value
            if isinstance(other, dict):
                changed |= other
            else:
                changed = dict(reversed(changed.items()))
    return changed


def _wrong_list(rng: Random, value: list[Any], trees: Sequence[Tree]) -> list[Any]:
    match rng.randrange(5):
        case 0:
            return [*value, _anything(rng, trees)]
        case 1:
            return value * rng.choice((2, 2, 3, NUM_MANY // max(1, len(value))))
        case 2:
            rng.shuffle(value)
            return value
        case 3:
            return value[: rng.randrange(len(value) + 1)]
        case _:
            other = rng.choice(rng.choice(trees).places).value
            return value + list(other) if isinstance(other, list) else value[1:]


def deep(form: Form) -> list[bytes]:
    """Nesting that a decoder which calls itself does not survive."""
    match form:
        case "msgpack":
            return [b"\x91" * DEPTH + b"\xc0", b"\x81\xa1x" * DEPTH + b"\xc0"]
        case "json":
            return [b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH]
        case "text":
            return [
                b"a = " + b"[" * DEPTH + b"]" * DEPTH,
                b"a = " + b"{a = " * DEPTH + b"}" * DEPTH,
            ]
        case _:
            return []
