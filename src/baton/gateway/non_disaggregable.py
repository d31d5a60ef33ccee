"""Which requests a vLLM decode worker serves alone: facts about vLLM's API, read from the body.

Where a field is not written as the harmless value, the request counts as one of these: that costs
a handoff, never an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.router.placement import NonDisaggregableField

if TYPE_CHECKING:
    from baton.gateway.request import CompletionBody

_FALSE: Final = frozenset({b"false", b"null"})
_ONE: Final = frozenset({b"1", b"null"})
_NULL: Final = frozenset({b"null"})

HARMLESS: Final = {
    NonDisaggregableField.N: _ONE,
    NonDisaggregableField.BEST_OF: _ONE,
    NonDisaggregableField.USE_BEAM_SEARCH: _FALSE,
    NonDisaggregableField.ECHO: _FALSE,
    NonDisaggregableField.PROMPT_LOGPROBS: _NULL,
    NonDisaggregableField.PROMPT_EMBEDS: _NULL,
}
"""The values with which a field changes nothing."""

HEAD_BYTES: Final = 64
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def find_non_disaggregable_field(body: CompletionBody) -> NonDisaggregableField | None:
    """The first field that makes a request one of these; None for nearly all requests."""
    fields = body.fields
    if not HARMLESS.keys().isdisjoint(fields):
        for field, harmless in HARMLESS.items():
            if field in fields and bytes(fields[field]) not in harmless:
                return field
    if "prompt" in fields and _has_several(fields["prompt"]):
        return NonDisaggregableField.PROMPTS
    return None


def _has_several(prompt: msgspec.Raw) -> bool:
    """Whether it is a list of texts or of token lists. One prompt may be a long list of numbers."""
    head = bytes(memoryview(prompt)[:HEAD_BYTES])
    if not head.startswith(b"[") or head[1:].lstrip()[:1].isdigit():
        return False
    return len(_items_decoder.decode(prompt)) > 1
