"""A request's prompt as its workers will see it: token ids, by the model's tokenizer and template.

For routing, and for workers of Baton's own with the same tokenizer, which then need not tokenize
it again. Where this cannot be known (another chat template in the request, a list of
prompts, a text that the template refuses), there are no ids, and the worker decides what is wrong.
Tools and images are taken up as well as a gateway can; whether the workers' own caches then match,
`baton_router_cached_tokens` shows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from baton.errors import UNDECODABLE, BatonError, ConfigError
from baton.protocol.engine_fields import ABSENT
from baton.tokenizer.chat_template import (
    TemplateMessage,
    load_chat_template,
    template_variables,
)
from baton.tokenizer.digest import digest_tokenizer
from baton.tokenizer.long_texts import MIN_PIECE_CHARS, is_too_long
from baton.tokenizer.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.gateway.request import CompletionBody
    from baton.tokenizer.chat_template import ChatTemplate, TemplateValue

NUM_THREADS: Final = 2
NUM_INLINE_BYTES: Final = 2048
"""Of JSON text; for more the event loop would stop too long, for less a thread costs more."""
MAX_PROMPT_BYTES: Final = 8 << 20
MAX_REMEMBERED_TOKENS: Final = 4 << 20
ENTRY_TOKENS: Final = 128
"""What each remembered prompt counts besides its own: its array and its place in the table take
about so much memory, and a prompt may have no token at all."""
UNKNOWN_WITH: Final = frozenset({
    "chat_template",
    "continue_final_message",
    "add_generation_prompt",
    "documents",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "functions",
})
"""Fields that change a prompt in ways that are not known here."""
SHAPING: Final = (
    "prompt",
    "messages",
    "tools",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
)
"""Fields on which a prompt depends."""


class _Function(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[msgspec.Raw] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _LongText(NamedTuple):
    """Perhaps too long for the model's context. `special`: whether special tokens are added."""

    text: str
    special: bool


_texts = msgspec.json.Decoder(str)
_ids = msgspec.json.Decoder(list[int])
_messages = msgspec.json.Decoder(list[_Message])
_parts = msgspec.json.Decoder(_Part)
_flags = msgspec.json.Decoder(bool | None)
_variables = msgspec.json.Decoder(dict[str, str | int | float | bool | None] | None)
_efforts = msgspec.json.Decoder(str | None)
_lists = msgspec.json.Decoder(list[object] | None)


class PromptTokenizer:
    """One model's. Owner: the event loop's thread; long texts are handled on `threads`.

    `max_context_tokens` gives what some worker has room for: of a text of more tokens, only the
    beginning is tokenized, and there are no ids.

    Raises:
        ConfigError: the folder has no tokenizer that can be read.
    """

    def __init__(
        self,
        model: Path,
        clock: Clock,
        threads: ThreadPoolExecutor,
        max_context_tokens: Callable[[], int],
    ) -> None:
        self.digest = digest_tokenizer(model)
        self._tokenizer: Tokenizer = load_tokenizer(model)
        self._template: ChatTemplate | None = load_chat_template(model, clock)
        self._threads, self._max_context_tokens = threads, max_context_tokens
        self._remembered: OrderedDict[int, NDArray[np.int32]] = OrderedDict()
        self._num_remembered = 0
        self._seed = secrets.randbits(64)

    async def tokenize(self, body: CompletionBody) -> NDArray[np.int32] | None:
        """Token ids `[num_tokens]` of the body's prompt; None where they cannot be known."""
        fields = body.fields
        if not UNKNOWN_WITH.isdisjoint(fields):
            return None
        shaping = [(name, memoryview(fields[name])) for name in SHAPING if name in fields]
        num_bytes = sum(len(value) for _, value in shaping)
        if num_bytes > MAX_PROMPT_BYTES:
            return None
        digest = xxhash.xxh3_64(seed=self._seed)
        for name, value in shaping:
            digest.update(name.encode())
            digest.update(value)
        key = digest.intdigest()
        known = self._remembered.get(key)
        if known is not None:
            self._remembered.move_to_end(key)
            return known
        work = self._chat if "messages" in fields else self._complete
        try:
            if num_bytes <= NUM_INLINE_BYTES:
                found = work(fields)
            else:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._threads, work, fields)
            ids = await self._encode_long(found) if isinstance(found, _LongText) else found
        except (BatonError, OverflowError, RuntimeError, *UNDECODABLE):
            return None  # RuntimeError: no thread can be started
        if ids is None:
            return None
        if self._template is None or self._template.is_timeless or "messages" not in fields:
            self._remember(key, ids)
        return ids

    def _remember(self, key: int, ids: NDArray[np.int32]) -> None:
        if key not in self._remembered and len(ids) + ENTRY_TOKENS <= MAX_REMEMBERED_TOKENS:
            self._remembered[key] = ids
            self._num_remembered += len(ids) + ENTRY_TOKENS
            while self._num_remembered > MAX_REMEMBERED_TOKENS:
                _, oldest = self._remembered.popitem(last=False)
                self._num_remembered -= len(oldest) + ENTRY_TOKENS

    async def _encode_long(self, long: _LongText) -> NDArray[np.int32] | None:
        """Token ids of a text that may fit; None of one that no worker has room for."""
        tokenizer, threads = self._tokenizer, self._threads
        if await is_too_long(tokenizer, long.text, self._max_context_tokens(), threads):
            return None
        encode = partial(tokenizer.encode, long.text, add_special_tokens=long.special)
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    def _encode(self, text: str, *, special: bool) -> NDArray[np.int32] | _LongText:
        if len(text) > MIN_PIECE_CHARS:
            return _LongText(text, special)
        return self._tokenizer.encode(text, add_special_tokens=special)

    def _complete(self, fields: dict[str, msgspec.Raw]) -> NDArray[np.int32] | _LongText:
        prompt = fields.get("prompt", ABSENT)
        if bytes(memoryview(prompt)[:1]) == b"[":
            return np.array(_ids.decode(prompt), dtype=np.int32)
        special = _read_flag(fields, default=True)
        return self._encode(_texts.decode(prompt), special=special)

    def _chat(self, fields: dict[str, msgspec.Raw]) -> NDArray[np.int32] | _LongText:
        if self._template is None:
            raise ConfigError("this model has no chat template")
        messages = [_for_template(each) for each in _messages.decode(fields["messages"])]
        variables: Mapping[str, TemplateValue] = (
            _variables.decode(fields.get("chat_template_kwargs", ABSENT)) or {}
        )
        if "reasoning_effort" in fields:
            effort = _efforts.decode(fields["reasoning_effort"])
            variables = template_variables(variables, effort)
        tools = _lists.decode(fields.get("tools", b"null"))
        text = self._template.render(messages, variables, tools)
        special = _read_flag(fields, default=False)
        return self._encode(text, special=special)


def _read_flag(fields: dict[str, msgspec.Raw], *, default: bool) -> bool:
    flag = _flags.decode(fields.get("add_special_tokens", b"null"))
    return default if flag is None else flag


def _for_template(message: _Message) -> TemplateMessage:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(map(_text_of, content))
    calls = None if message.tool_calls is None else [*map(_call_of, message.tool_calls)]
    role = "system" if message.role == "developer" else message.role
    return TemplateMessage(role, content, message.name, calls, message.tool_call_id)


def _text_of(raw: msgspec.Raw) -> str:
    """A part's text; of an image or the like a name for it, so that two of them differ."""
    part = _parts.decode(raw)
    if part.type == "text" and part.text is not None:
        return part.text
    return f"<{part.type} {xxhash.xxh3_64_hexdigest(memoryview(raw))}>"


def _call_of(call: _ToolCall) -> object:
    """As templates expect it: arguments as an object, where they are JSON."""
    built: dict[str, object] = msgspec.to_builtins(call)
    function = built["function"]
    if isinstance(function, dict) and call.function.arguments is not None:
        try:
            function["arguments"] = msgspec.json.decode(call.function.arguments)
        except UNDECODABLE:
            return built
    return built
