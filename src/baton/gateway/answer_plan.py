"""What a body asks for: one answer, or several, of one prompt or more. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.errors import UNDECODABLE, InvalidRequestError
from baton.protocol.engine_fields import ABSENT, is_off
from baton.protocol.prompt_bounds import MAX_IDS, check_ids

if TYPE_CHECKING:
    from baton.gateway.request import CompletionBody

SERVED_WHOLE: Final = ("use_beam_search", "prompt_embeds")
"""Where these are on, `n` and `prompt` mean something else; the engine that knows them gets all."""

MAX_SEED: Final = 2**63 - 1
HEAD_BYTES: Final = 64
_HARMLESS: Final = frozenset({b"1", b"null"})

_count_decoder = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=1, le=MAX_SEED)])
_seed_decoder = msgspec.json.Decoder(Annotated[int, msgspec.Meta(le=MAX_SEED)])
_texts_decoder = msgspec.json.Decoder(list[str])
_OF_INTEGERS: Final = b"0123456789-, \t\r\n"
_lists_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`num_answers` to each of `prompts`, which are bodies of one prompt and one answer."""

    prompts: tuple[CompletionBody, ...]
    num_answers: int = 1

    @property
    def num_total(self) -> int:
        """All answers together."""
        return len(self.prompts) * self.num_answers

    @property
    def num_bytes(self) -> int:
        """Of JSON text, in all requests that are made of this one."""
        return self.num_answers * sum(
            len(memoryview(raw)) for body in self.prompts for raw in body.fields.values()
        )

    def body(self, prompt: int, answer: int) -> CompletionBody:
        """The request for one answer. Each has a seed of its own where the client gave one."""
        body = self.prompts[prompt]
        if not answer or "seed" not in body.fields:
            return body
        try:
            seed = _seed_decoder.decode(body.fields["seed"]) + answer
        except UNDECODABLE:
            return body  # its worker refuses it
        if seed > MAX_SEED:
            seed -= 2 * (MAX_SEED + 1)
        return replace(body, fields={**body.fields, "seed": msgspec.Raw(b"%d" % seed)})


def plan_answers(body: CompletionBody, max_answers: int) -> AnswerPlan:
    """Read `n`, `best_of` and `prompt`.

    Raises:
        InvalidRequestError: a value is not what it should be, or the answers are too many.
    """
    fields = body.fields
    prompt = None if "messages" in fields else fields.get("prompt")
    head = b"" if prompt is None else bytes(memoryview(prompt)[:HEAD_BYTES])
    item = head[1:].lstrip()[:1] if head.startswith(b"[") else b""
    lists_prompts = item in {b'"', b"["}
    if not lists_prompts and "n" not in fields and "best_of" not in fields:
        return AnswerPlan((body,))
    if any(name in fields and not is_off(name, fields[name]) for name in SERVED_WHOLE):
        return AnswerPlan((body,))
    num_answers = _read_n(fields)
    one = {name: raw for name, raw in fields.items() if name not in {"n", "best_of"}}
    if prompt is None or not lists_prompts:
        _check_total(1, num_answers, max_answers)
        return AnswerPlan((replace(body, fields=one),), num_answers)
    items = _read_prompts(prompt, max_answers, texts=item == b'"')
    _check_total(len(items), num_answers, max_answers)
    return AnswerPlan(
        tuple(replace(body, fields={**one, "prompt": item}) for item in items), num_answers
    )


def _read_n(fields: dict[str, msgspec.Raw]) -> int:
    n = _read_count("n", fields.get("n", ABSENT))
    if "best_of" in fields and bytes(fields["best_of"]) != b"null":
        best_of = _read_count("best_of", fields["best_of"])
        if best_of != n:
            raise InvalidRequestError(
                f"best_of={best_of} with n={n} is not supported: no engine ranks answers. Leave "
                "best_of out, ask for more answers with n and logprobs, and choose",
                param="best_of",
                code="unsupported_parameter",
            )
    return n


def _read_count(name: str, raw: msgspec.Raw) -> int:
    if bytes(raw) in _HARMLESS:
        return 1
    try:
        count: int = _count_decoder.decode(raw)
    except UNDECODABLE as exc:
        raise InvalidRequestError(
            f"{name} must be a whole number of at least 1", param=name, code="invalid_value"
        ) from exc
    return count


def _read_prompts(prompt: msgspec.Raw, max_prompts: int, *, texts: bool) -> list[msgspec.Raw]:
    """The prompts of a list, each as JSON text. What is too many is not built."""
    raw = bytes(prompt)
    try:
        if texts:
            # A text's first quote counts, its last may (after a backslash it does not), no other.
            num_quotes = raw.count(b'"') - raw.count(b'\\"')
            _check_total(num_quotes // 2, 1, max_prompts)
            items = _texts_decoder.decode(raw)
        else:
            _check_total(raw.count(b"[") - 1, 1, max_prompts)
            check_ids(raw, MAX_IDS)
            lists = _lists_decoder.decode(raw)
            # Not built: a million numbers take 20 ms, which others wait.
            if any(bytes(item).translate(None, _OF_INTEGERS) != b"[]" for item in lists):
                raise _not_prompts()
            return lists
    except UNDECODABLE as exc:
        raise _not_prompts() from exc
    return [msgspec.Raw(_encoder.encode(item)) for item in items]


def _not_prompts() -> InvalidRequestError:
    return InvalidRequestError(
        "prompt must be a string or a list of token ids, or a list of one of these",
        param="prompt",
        code="invalid_value",
    )


def _check_total(num_prompts: int, num_answers: int, max_answers: int) -> None:
    if num_prompts * num_answers > max_answers:
        raise InvalidRequestError(
            f"a request may ask for {max_answers} answers, this one asks for {num_answers} to each "
            f"of {num_prompts} prompts or more: send several requests",
            param="n" if num_answers > 1 else "prompt",
            code="too_many_answers",
        )
