"""Text to token ids and back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from baton.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Decoder(msgspec.Struct, frozen=True):
    type: str = ""
    decoders: tuple[_Decoder, ...] = ()

    def spells_bytes(self) -> bool:
        """Whether each character of a piece stands for one byte (GPT-2's alphabet)."""
        return self.type == "ByteLevel" or any(inner.spells_bytes() for inner in self.decoders)


class _TokenizerFile(msgspec.Struct, frozen=True):
    decoder: _Decoder | None = None


class Tokenizer:
    """Encodes prompts and decodes runs of tokens. Immutable after construction.

    `longest_token_chars`: of the vocabulary's own spelling, in which a character may be one byte.
    """

    def __init__(self, fast: FastTokenizer, *, spells_bytes: bool) -> None:
        self._fast = fast
        self._spells_bytes = spells_bytes
        self._special = frozenset(
            token for token, added in fast.get_added_tokens_decoder().items() if added.special
        )
        self.longest_token_chars = max(map(len, fast.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Token ids `[n]` of `text`; may take long: run it on a thread for long texts.

        Raises:
            EngineError: the library failed.
        """
        # A batch of one: only batches release the interpreter's lock, and "fast" skips offsets.
        try:
            (encoding,) = self._fast.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except BaseException as exc:
            if _is_panic(exc):
                raise EngineError(f"the tokenizer failed: {exc}") from exc
            raise
        return np.asarray(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a run of tokens; what is not UTF-8 becomes U+FFFD."""
        return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, which has the added ones; None: there is none."""
        found: int | None = self._fast.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which may be a part of a character."""
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special:
            return str(piece).encode()
        if self._spells_bytes and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        if found := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return str(piece).replace("\u2581", " ").encode()


def load_tokenizer(model: Path) -> Tokenizer:
    """Read `tokenizer.json` of a model folder.

    Raises:
        ConfigError: the folder has none, or it cannot be read.
    """
    path = model / "tokenizer.json"
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"the model folder {model} has no readable tokenizer.json ({exc.strerror}); save one "
            "there with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        ) from exc
    try:
        fast = FastTokenizer.from_buffer(raw)
        decoder = msgspec.json.decode(raw, type=_TokenizerFile).decoder
    except BaseException as exc:  # tokenizers raises bare Exception
        if not (isinstance(exc, Exception) or _is_panic(exc)):
            raise
        raise ConfigError(f"{path} is not a tokenizer that this version can read: {exc}") from exc
    fast.no_truncation()
    fast.no_padding()
    return Tokenizer(fast, spells_bytes=decoder is not None and decoder.spells_bytes())


def _is_panic(exc: BaseException) -> bool:
    """Of the library's Rust: a class that cannot be imported, and that is no `Exception`."""
    return type(exc).__name__ == "PanicException"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF: Final = _byte_alphabet()
