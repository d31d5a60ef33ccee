"""What the gateway takes for the least length of a text is never more than it has."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.prompt_bounds import count_chars


@given(st.text(max_size=200), st.booleans(), st.text(alphabet=" \n\t", max_size=3))
def test_a_text_has_at_least_so_many_characters(text: str, ascii_only: bool, space: str) -> None:
    raw = space + json.dumps(text, ensure_ascii=ascii_only) + space
    assert count_chars(raw.strip().encode("utf-8", "replace"), is_text=True) <= len(text)


@given(st.lists(st.integers(0, 9), max_size=50))
def test_ids_are_no_text(ids: list[int]) -> None:
    assert count_chars(json.dumps(ids).encode(), is_text=True) == 0


def test_plain_text_is_counted_in_full() -> None:
    assert count_chars(b'"' + b"word " * 100 + b'"', is_text=True) == 500
