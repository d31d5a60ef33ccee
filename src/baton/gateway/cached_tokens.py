"""`cached_tokens` in the usage of a prompt that was handed over: those of its prefill worker.

The worker that answers has computed nothing of such a prompt. vLLM counts all of it as cached, the
embedded engine what it had before the handoff.
"""

from __future__ import annotations

import re
from typing import Final

USAGE_BYTES: Final = 1024
"""An answer's usage is within so many bytes of its end."""
CACHED_TOKENS: Final = re.compile(rb'"cached_tokens": ?([0-9]{1,9})[,}]')
_PROMPT_TOKENS: Final = re.compile(rb'"prompt_tokens": ?([0-9]{1,9})[,}]')


def replace_cached_tokens(answer: bytes, num_cached: int) -> bytes:
    """An answer, or an event of one, with this number in its usage, if there is one at its end.

    No more than the prompt has: that of a stream that went on had tokens of the answer, too.
    """
    at = max(0, len(answer) - USAGE_BYTES)
    found = [*CACHED_TOKENS.finditer(answer, at)]
    if not found:
        return answer
    num_prompt = _PROMPT_TOKENS.findall(answer, at)
    if num_prompt:
        num_cached = min(num_cached, int(num_prompt[-1]))
    start, stop = found[-1].span(1)
    return b"%b%d%b" % (answer[:start], num_cached, answer[stop:])
