"""How long a prompt probably is. A gateway has no tokenizer, and placement needs no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.gateway.request import CompletionBody

BYTES_PER_TOKEN: Final = 4
"""Of JSON text: about right for English with the usual tokenizers, and for lists of token ids."""

PROMPT_FIELDS: Final = ("messages", "prompt", "tools")


def estimate_prompt_tokens(body: CompletionBody) -> int:
    """Tokens of a request's prompt, to within a factor of two or so."""
    sizes = (len(bytes(body.fields[name])) for name in PROMPT_FIELDS if name in body.fields)
    return sum(sizes) // BYTES_PER_TOKEN
