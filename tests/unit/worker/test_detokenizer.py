from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from baton.tokenizer.tokenizer import Tokenizer
from baton.worker.output_processor import MAX_PENDING_TOKENS, REPLACEMENT, IncrementalDetokenizer
from tests.unit.worker.scripted_engine import TOKENIZER, VOCAB_SIZE, token_ids


def stream(tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt or [], skip_special_tokens=True)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)))
def test_pieces_are_the_text_and_never_a_part_of_a_character(text: str) -> None:
    tokens = token_ids(text)
    pieces = stream(tokens)
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert REPLACEMENT not in "".join(pieces)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_any_tokens_give_text_and_each_piece_comes_soon(tokens: list[int]) -> None:
    pieces = stream(tokens)
    "".join(pieces).encode()
    silence = 0
    for token, piece in zip(tokens, pieces, strict=False):
        visible = bool(TOKENIZER.decode([token], skip_special_tokens=True))
        silence = 0 if piece else silence + visible
        assert silence < MAX_PENDING_TOKENS


def test_what_was_emitted_does_not_change_when_garbage_turns_into_a_character() -> None:
    # Bytes of "é" after a long run of lone continuation bytes.
    byte = {TOKENIZER.token_bytes(i): i for i in range(VOCAB_SIZE)}
    garbage = [byte[b"\x80"]] * (MAX_PENDING_TOKENS + 2)
    text = "".join(stream([*garbage, byte[b"\xc3"], byte[b"\xa9"], *token_ids(" fine")]))
    assert text.endswith(" fine")
    assert set(text.removesuffix(" fine")) <= {REPLACEMENT, "é"}


def test_unfinished_bytes_become_replacements_at_the_end_only() -> None:
    tokens = token_ids("caf\u00e9")
    start_of_emoji = token_ids("\U0001f60a")[0]
    *pieces, last = stream([*tokens, start_of_emoji])
    assert "".join(pieces) == "café"
    assert last == REPLACEMENT


def make_sentencepiece_like() -> Tokenizer:
    """Llama 2's way: ▁ begins a word, <0xNN> is a byte, a leading space goes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "c"]
    fast = FastTokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence([
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])
    return Tokenizer(fast, spells_bytes=False)


def test_the_prompt_keeps_the_space_before_the_first_word() -> None:
    tokenizer = make_sentencepiece_like()
    a, b, c = 257, 258, 259
    detokenizer = IncrementalDetokenizer(tokenizer, [a], skip_special_tokens=True)
    assert [detokenizer.push(token) for token in (b, c, a)] == [" b", "c", " a"]


def test_byte_tokens_wait_for_their_character() -> None:
    tokenizer = make_sentencepiece_like()
    detokenizer = IncrementalDetokenizer(tokenizer, [257], skip_special_tokens=True)
    pieces = [detokenizer.push(1 + byte) for byte in "叫é".encode()]
    assert pieces == ["", "", "叫", "", "é"]


@pytest.mark.parametrize(("token", "raw"), [(1 + 0xE5, b"\xe5"), (258, b" b"), (10**9, b"")])
def test_bytes_of_sentencepiece_tokens(token: int, raw: bytes) -> None:
    assert make_sentencepiece_like().token_bytes(token) == raw


@given(st.text(max_size=30))
def test_bytes_of_tokens_add_up_to_the_text(text: str) -> None:
    raw = b"".join(TOKENIZER.token_bytes(token) for token in token_ids(text))
    assert raw.decode() == TOKENIZER.decode(token_ids(text), skip_special_tokens=False)
