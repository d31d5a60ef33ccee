"""What the gateway takes for the least length of a text is never more than it has."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.prompt_bounds import count_chars


@given(st.text(max_size=200), st.booleans())
def test_a_text_has_at_least_so_many_characters(text: str, ascii_only: bool) -> None:
    raw = json.dumps(text, ensure_ascii=ascii_only).encode()
    assert count_chars(raw) <= len(text)


@given(st.lists(st.integers(0, 9), max_size=50))
def test_ids_are_no_text(ids: list[int]) -> None:
    assert count_chars(json.dumps(ids).encode()) == 0


def test_plain_text_is_counted_in_full() -> None:
    assert count_chars(b'"' + b"word " * 100 + b'"') == 500
