"""Bounds on a request's prompt that cost no more than a look at its JSON text. Pure."""

from __future__ import annotations

import re
from typing import Final

from baton.errors import ContextLengthError, InvalidRequestError

MAX_MESSAGES: Final = 4096
MAX_PROMPTS: Final = 1024
MAX_IDS: Final = 1 << 20
"""Of all prompts of one request together, where the context is smaller."""
_HEAD_BYTES: Final = 64
_MAX_ESCAPE_BYTES: Final = 6
"""\\uXXXX: one character, or half of one."""
_MAX_UTF8_BYTES: Final = 4
_ROLE_ESCAPES: Final = (rb"\u0072", rb"\u006")
"""Of the letters in `role`: a key with one of them is the same key."""
_ROLE_KEY: Final = re.compile(rb'"(?:r|\\u0072)(?:o|\\u006[fF])(?:l|\\u006[cC])(?:e|\\u0065)"')


def lists_ids(prompt: bytes | memoryview) -> bool:
    """Whether a prompt's JSON text is a list of token ids, or of such lists."""
    head = bytes(prompt[:_HEAD_BYTES]).lstrip()
    return head.startswith(b"[") and not head[1:].lstrip().startswith(b'"')


def check_ids(prompt: bytes, max_context_tokens: int) -> None:
    """Refuse more token ids than can be served, before a list is built of them.

    `prompt` is the JSON text of a field that `lists_ids`.

    Raises:
        ContextLengthError: one prompt has more ids than the context holds.
        InvalidRequestError: the prompts are too many, or have too many ids together.
    """
    num_ids, num_prompts = prompt.count(b",") + 1, prompt.count(b"[") - 1
    if num_prompts <= 0 and num_ids > max_context_tokens:
        raise ContextLengthError(
            f"this model's context holds {max_context_tokens} tokens; the prompt has {num_ids}. "
            "Shorten the prompt.",
            code="context_length_exceeded",
        )
    limit = max(MAX_IDS, max_context_tokens)
    if num_prompts > MAX_PROMPTS or num_ids > limit:
        raise InvalidRequestError(
            f"a request may have {MAX_PROMPTS} prompts and {limit} token ids in all of them; this "
            f"one has {num_prompts} and {num_ids}: send several requests",
            param="prompt",
            code="too_many_prompts",
        )


def count_chars(prompt: bytes) -> int:
    """At least so many characters has a prompt, whose JSON text this is; 0 if it is no string."""
    if prompt[:1] != b'"':
        return 0
    num_bytes = len(prompt) - 2 - _MAX_ESCAPE_BYTES * prompt.count(b"\\")
    return max(0, num_bytes if prompt.isascii() else num_bytes // _MAX_UTF8_BYTES)


def check_messages(messages: bytes) -> None:
    """Refuse more than `MAX_MESSAGES` messages, before they are built. The field's JSON text.

    Within a JSON string every quote is escaped: `"role"` is a key, or a whole string.

    Raises:
        InvalidRequestError: there are more.
    """
    num_messages = messages.count(b'"role"')
    if any(escape in messages for escape in _ROLE_ESCAPES):
        num_messages = sum(1 for _ in _ROLE_KEY.finditer(messages))
    if num_messages > MAX_MESSAGES:
        raise InvalidRequestError(
            f"{num_messages} messages are more than {MAX_MESSAGES}; leave out the oldest",
            param="messages",
            code="too_many_messages",
        )
