"""Tokens → text as they come, never emitting a part of a character.

A decoder may merge, strip or replace at the edges of what it is given, so a token is never
decoded alone: a short window of settled tokens in front gives it context.

    tokens:   … settled │ pending        text(settled + pending) minus text(settled) is new
                [start, split) [split, n)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.worker.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"
NUM_CONTEXT_TOKENS: Final = 5
MAX_PENDING_TOKENS: Final = 8
"""A character has at most 4 bytes, so more pending tokens than this can only be garbage."""


class IncrementalDetokenizer:
    """One answer's tokens → text. The prompt's last tokens give the first token its context."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = list(prompt_tail[-NUM_CONTEXT_TOKENS:])
        self._split = len(self._window)
        self._settled_text = self._decode(self._window)

    def push(self, token_id: int) -> str:
        """Add a token; the text that is now certain, possibly none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._split < MAX_PENDING_TOKENS:
            return ""
        return self._settle(text)

    def finish(self) -> str:
        """The text of what is still pending: no more tokens will complete it."""
        return self._settle(self._decode(self._window))

    def _settle(self, text: str) -> str:
        new = text[len(self._settled_text) :]
        if text.endswith(REPLACEMENT):
            # Cut here: a later token must not change what has been emitted.
            self._window.clear()
        else:
            del self._window[: self._split]
        self._split = len(self._window)
        self._settled_text = self._decode(self._window)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)
