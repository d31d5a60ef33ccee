"""An ask → a request's bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import msgspec

from baton.bench.workloads.asking import Endpoint, GivenBody, Segments
from baton.bench.workloads.prompts import Calibration, PromptWriter, TokenIds

if TYPE_CHECKING:
    from baton.bench.workloads.asking import Ask


@dataclass(frozen=True, slots=True)
class Manner:
    """How this server is asked.

    `endpoint` is for prompts that are made up. `form`: token ids, or words by a calibration.
    `has_exact_lengths`: the server takes `ignore_eos`, so answers are as long as they should be.
    """

    model: str
    endpoint: Endpoint
    form: TokenIds | Calibration
    has_exact_lengths: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, ready to be sent."""

    endpoint: Endpoint
    body: bytes
    ask: Ask


@dataclass(frozen=True, slots=True)
class BodyWriter:
    """Writes requests of one run. Immutable."""

    manner: Manner
    prompts: PromptWriter

    def prepare(self, ask: Ask) -> Prepared:
        """The request for an ask."""
        match ask.prompt:
            case Segments() as segments:
                endpoint = self.manner.endpoint
                fields = {**self._prompt(segments), **self._lengths(ask)}
            case GivenBody(endpoint, given):
                fields = dict(given)
            case other:
                assert_never(other)
        fields |= {
            "model": self.manner.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Prepared(endpoint, msgspec.json.encode(fields), ask)

    def _prompt(self, segments: Segments) -> dict[str, object]:
        match self.manner.form:
            case TokenIds() as ids:
                return {"prompt": self.prompts.write_ids(segments, ids)}
            case Calibration() as calibration:
                text = self.prompts.write_words(segments, calibration)
                if self.manner.endpoint == "chat":
                    return {"messages": [{"role": "user", "content": text}]}
                return {"prompt": text}
            case other:
                assert_never(other)

    def _lengths(self, ask: Ask) -> dict[str, object]:
        fields: dict[str, object] = {"temperature": 0.0}
        if ask.num_output_tokens is not None:
            fields["max_tokens"] = ask.num_output_tokens
            if self.manner.has_exact_lengths:
                fields["ignore_eos"] = True
        return fields
