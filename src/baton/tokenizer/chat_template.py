"""A model's chat template: messages to the text of a prompt."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import UNDECODABLE, ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser

    from baton.clock import Clock

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
    content: str | None
    name: str | None = None
    tool_calls: list[object] | None = None
    tool_call_id: str | None = None


class _GenerationMark(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training: here it does nothing."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (an instance attribute in Jinja's typing)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body, drop the mark."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders chats of one model. Immutable after construction.

    `is_timeless`: the same messages always give the same text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        self._special_tokens = dict(special_tokens)
        self.is_timeless = "strftime_now" not in source
        self._template = _compile(source, clock)

    def render(
        self,
        messages: Sequence[TemplateMessage],
        variables: Mapping[str, TemplateValue],
        tools: list[object] | None = None,
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
                "tools": tools,
                "documents": None,
                "add_generation_prompt": True,
            })
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as exc:
            raise InvalidRequestError(
                f"this model's chat template refuses the messages: {exc}", param="messages"
            ) from exc


def template_variables(
    given: Mapping[str, TemplateValue], reasoning_effort: str | None
) -> Mapping[str, TemplateValue]:
    """What a template gets of `chat_template_kwargs` and `reasoning_effort`: the same as in vLLM.

    Some templates think only where they are asked to: an effort is that, unless the request names
    `enable_thinking`.
    """
    if reasoning_effort is None:
        return given
    thinks = reasoning_effort != "none"
    return {"enable_thinking": thinks, **given, "reasoning_effort": reasoning_effort}


def load_chat_template(model: Path, clock: Clock) -> ChatTemplate | None:
    """Read the template of a model folder; None if the model has none.

    Raises:
        ConfigError: a file cannot be read, or the template does not compile.
    """
    config = _read_config(model)
    source = _read_source(model, config)
    if source is None:
        return None
    try:
        return ChatTemplate(source, _special_tokens(config), clock)
    except TemplateError as exc:
        raise ConfigError(f"the chat template of {model} does not compile: {exc}") from exc


def read_special_tokens(model: Path) -> Mapping[str, str]:
    """The texts of those of `SPECIAL_TOKENS` that a model folder's tokenizer names.

    Raises:
        ConfigError: tokenizer_config.json cannot be read.
    """
    return _special_tokens(_read_config(model))


def _special_tokens(config: _TokenizerConfig) -> Mapping[str, str]:
    texts = {name: _token_text(getattr(config, name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text}


def _read_config(model: Path) -> _TokenizerConfig:
    path = model / "tokenizer_config.json"
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


def _to_json(  # noqa: PLR0917 - templates may give options by place
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """With the options of the filter in transformers, for which templates are written."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)
