"""Whether a text has too many tokens, without tokenizing all of it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from baton.tokenizer.tokenizer import Tokenizer

USUAL_CHARS_PER_TOKEN: Final = 4
MIN_PIECE_CHARS: Final = 16_384
MAX_PIECE_CHARS: Final = 65_536
"""A twentieth of a second: other texts have their turn between two pieces."""
MAX_TOKENS_PER_CUT: Final = 16


async def is_too_long(tokenizer: Tokenizer, text: str, limit: int, threads: Executor) -> bool:
    """Whether a text certainly has more than `limit` tokens. False: it may, and may not.

    At no cost, if it is too long even where each of its tokens is the longest there is, or short
    enough to be tokenized at once; else its beginning is tokenized on `threads`, until those of one
    that is a little too long.
    """
    if len(text) > limit * tokenizer.longest_token_chars:
        return True
    usual_chars = max(MIN_PIECE_CHARS, limit * USUAL_CHARS_PER_TOKEN)
    if len(text) <= usual_chars:
        return False
    loop, num_tokens = asyncio.get_running_loop(), 0
    piece_chars = min(usual_chars, MAX_PIECE_CHARS)
    for num_cuts, start in enumerate(range(0, len(text), piece_chars)):
        piece = text[start : start + piece_chars]
        encode = partial(tokenizer.encode, piece, add_special_tokens=False)
        num_tokens += len(await loop.run_in_executor(threads, encode))
        # Cut in two, a word has a few tokens more.
        if num_tokens - MAX_TOKENS_PER_CUT * num_cuts > limit:
            return True
    return False
