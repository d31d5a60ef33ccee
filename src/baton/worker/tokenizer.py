"""Text to token ids: the tokenizer and the model's chat template."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from baton.errors import UNDECODABLE, ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2 import Template
    from jinja2.parser import Parser
    from numpy.typing import NDArray

    from baton.clock import Clock


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

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Token ids `[n]` of `text`; may take long: run it on a thread for long texts."""
        # A batch of one: only batches release the interpreter's lock, and "fast" skips offsets.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.asarray(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a run of tokens; what is not UTF-8 becomes U+FFFD."""
        return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

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
    except Exception as exc:  # tokenizers raises bare Exception
        raise ConfigError(f"{path} is not a tokenizer that this version can read: {exc}") from exc
    fast.no_truncation()
    fast.no_padding()
    return Tokenizer(fast, spells_bytes=decoder is not None and decoder.spells_bytes())


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF: Final = _byte_alphabet()


SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")
TemplateValue = str | int | float | bool | None


class _AddedToken(msgspec.Struct, frozen=True):
    content: str


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    sep_token: str | _AddedToken | None = None


class TemplateMessage(msgspec.Struct, frozen=True):
    """One message of a chat, as a template sees it."""

    role: str
    content: str
    name: str | None = None


class _GenerationMark(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training: here it does nothing."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (an instance attribute in Jinja's typing)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body, drop the mark."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders chats of one model. Immutable after construction."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source, clock)

    def render(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, TemplateValue]
    ) -> str:
        """The prompt's text, up to where the answer begins.

        Raises:
            InvalidRequestError: the template refuses these messages; the message is its own.
        """
        seen = [
            {key: value for key, value in msgspec.structs.asdict(m).items() if value is not None}
            for m in messages
        ]
        try:
            return self._template.render({
                **variables,
                **self._special_tokens,
                "messages": seen,
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
            })
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as exc:
            raise InvalidRequestError(
                f"this model's chat template refuses the messages: {exc}", param="messages"
            ) from exc


def load_chat_template(model: Path, clock: Clock) -> ChatTemplate | None:
    """Read the template of a model folder; None if the model has none.

    Raises:
        ConfigError: a file cannot be read, or the template does not compile.
    """
    config = _read_config(model / "tokenizer_config.json")
    source = _read_source(model, config)
    if source is None:
        return None
    special = {
        name: text for name in SPECIAL_TOKENS if (text := _token_text(getattr(config, name)))
    }
    try:
        return ChatTemplate(source, special, clock)
    except TemplateError as exc:
        raise ConfigError(f"the chat template of {model} does not compile: {exc}") from exc


def _read_config(path: Path) -> _TokenizerConfig:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig)
    except FileNotFoundError:
        return _TokenizerConfig()
    except (OSError, *UNDECODABLE) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc


def _read_source(model: Path, config: _TokenizerConfig) -> str | None:
    try:
        return (model / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{model / 'chat_template.jinja'} cannot be read: {exc}") from exc
    if isinstance(config.chat_template, list):
        named = {one.name: one.template for one in config.chat_template}
        return named.get("default")
    return config.chat_template


def _token_text(token: str | _AddedToken | None) -> str | None:
    return token.content if isinstance(token, _AddedToken) else token


def _compile(source: str, clock: Clock) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=["jinja2.ext.loopcontrols", _GenerationMark],
    )

    def strftime_now(pattern: str) -> str:
        return datetime.fromtimestamp(clock.unix_now(), UTC).astimezone().strftime(pattern)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)
