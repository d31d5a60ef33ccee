"""OpenAI's two request bodies as far as Baton's own engines answer them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_STOPS = 16
MAX_LOGPROBS = 20
_MAX_INT = 2**63 - 1

Temperature: TypeAlias = Annotated[
    float, Meta(ge=0, le=2, description="a number from 0 (greedy) to 2")
]
TopP: TypeAlias = Annotated[
    float, Meta(gt=0, le=1, description="a number above 0 and at most 1 (1 is off)")
]
TopK: TypeAlias = Annotated[
    int, Meta(ge=-1, le=_MAX_INT, description="a whole number of at least 1, or 0 or -1 for off")
]
MaxTokens: TypeAlias = Annotated[
    int, Meta(ge=1, le=_MAX_INT, description="a whole number of at least 1")
]
MinTokens: TypeAlias = Annotated[
    int, Meta(ge=0, le=_MAX_INT, description="a whole number of at least 0")
]
Seed: TypeAlias = Annotated[
    int, Meta(ge=-_MAX_INT - 1, le=_MAX_INT, description="a whole number that fits 64 bits")
]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
StopList: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Stop: TypeAlias = Annotated[
    StopString | StopList | None,
    Meta(description=f"a non-empty string, or a list of at most {MAX_STOPS} of them"),
]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
StopTokenIds: TypeAlias = Annotated[
    list[TokenId], Meta(max_length=1024, description="a list of token ids")
]
NumLogprobs: TypeAlias = Annotated[
    int, Meta(ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}")
]
Prompt: TypeAlias = Annotated[
    str | list[int | str | list[int]],
    Meta(description="one prompt: a string, or a list of token ids"),
]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides its text."""

    include_usage: bool | None = None


class Resume(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the answer is with the client: the tokens `[0, len(token_ids))`.

    `is_complete`: that is all, and only what ends a stream is missing. `standby`, a random id, in
    hex: the client gets more tokens from another worker; they follow by `standby_path`.
    `group_sizes`: how many of them each output of a vLLM engine had; None: one.
    """

    token_ids: list[TokenId]
    is_complete: bool = False
    standby: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")] | None = None
    group_sizes: list[Annotated[int, Meta(ge=1)]] | None = None


class KVTransferParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the gateway adds: clients cannot send it (docs/wire/worker-http.md).

    `baton_prompt`: the prompt's token ids, where the gateway has the worker's own tokenizer.
    """

    baton_ticket: str | None = None
    baton_resume: Resume | None = None
    baton_prompt: list[TokenId] | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both bodies share."""

    model: Annotated[str, Meta(description="the name of a model that /v1/models lists")]
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: Stop = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(max_length=1024, description="a short string")] | None = None
    kv_transfer_params: KVTransferParams | None = None


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: NumLogprobs | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Annotated[str, Meta(min_length=1, max_length=64, description="a role such as 'user'")]
    content: Annotated[
        str | list[TextPart] | None, Meta(description="a string, or a list of text parts")
    ] = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Messages: TypeAlias = Annotated[
    list[ChatMessage],
    Meta(min_length=1, description="a list of at least one message with 'role' and 'content'"),
]


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    reasoning_effort: (
        Annotated[ReasoningEffort, Meta(description="how much to think, if the model can")] | None
    ) = None
    chat_template_kwargs: (
        Annotated[
            dict[str, str | int | float | bool | None],
            Meta(description="an object of plain values"),
        ]
        | None
    ) = None
