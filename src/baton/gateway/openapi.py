"""`/openapi.json`: what the gateway serves, made from the structs of requests and answers.

OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0). Schemas of answers have what all engines
answer; vLLM's have more.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from baton import __version__
from baton.gateway.request import MAX_MODEL_CHARS
from baton.gateway.targets import (
    ITL_HEADER,
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    MIN_MS,
    PRIORITY_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)
from baton.protocol.engine_fields import VLLM_FIELDS
from baton.protocol.gateway_http import (
    ALERTS_PATH,
    DASHBOARD_PATH,
    DEMAND_PATH,
    LINKS_PATH,
    OPENAPI_PATH,
    QUEUE_PATH,
    READY_PATH,
    REQUESTS_PATH,
    ROUTE_PATH,
    TRANSFERS_PATH,
    WORKERS_PATH,
)
from baton.protocol.request_fields import ChatFields, CompletionFields
from baton.protocol.worker_http import (
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    HEALTH_PATH,
    METRICS_PATH,
    MODELS_PATH,
    VERSION_PATH,
    ErrorBody,
    ServedModel,
    ServedModels,
    Version,
)
from baton.router.fair_queue import Priority

Json: TypeAlias = dict[str, Any]

_VLLM_ONLY: Final = msgspec.defstruct(
    "_VLLM_ONLY",
    [
        (name, Annotated[type_, Meta(description="served by the engine vllm alone")] | None, None)
        for name, type_ in sorted(VLLM_FIELDS.items())
    ],
)
_Answers: TypeAlias = Annotated[int, Meta(ge=1, description="answers to each prompt")]


class Status(msgspec.Struct, frozen=True):
    """The answer to `/health` and `/ready`."""

    status: str


class ChatCompletionRequest(ChatFields, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    n: _Answers | None = None


class CompletionRequest(CompletionFields, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[
        str | list[int | str | list[int]],
        Meta(description="a string, a list of token ids, or a list of these: several prompts"),
    ]
    n: _Answers | None = None
    best_of: Annotated[int, Meta(description="as n, if at all")] | None = None


class AnswerUsage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(msgspec.Struct, frozen=True):
    """The message that the model generated."""

    role: str
    content: str | None


class ChatAnswerChoice(msgspec.Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: AnswerMessage
    finish_reason: str | None


class CompletionAnswerChoice(msgspec.Struct, frozen=True):
    """One continuation of a prompt."""

    index: int
    text: str
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer to `POST /v1/chat/completions` that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatAnswerChoice]
    usage: AnswerUsage


class Completion(msgspec.Struct, frozen=True):
    """The answer to `POST /v1/completions` that is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionAnswerChoice]
    usage: AnswerUsage


@cache
def describe(*, is_managed_here: bool) -> bytes:
    """The document, as JSON. With `is_managed_here` of what a management listener would serve, too.

    It is made when it is first asked for: nothing else needs these schemas.
    """
    paths = {
        CHAT_COMPLETIONS_PATH: _completion("chat", ChatCompletionRequest, ChatCompletion),
        COMPLETIONS_PATH: _completion("a prompt", CompletionRequest, Completion),
        MODELS_PATH: _get("list_models", "the models that are served", _json(ServedModels)),
        MODELS_PATH + "/{model}": {
            "parameters": [_path_parameter("model", "its name")],
            **_get("show_model", "one model", _json(ServedModel), "401", "404"),
        },
        HEALTH_PATH: _get("health", "the gateway runs", _json(Status)),
        READY_PATH: _get("ready", "requests can be served", _json(Status), "503"),
        VERSION_PATH: _get("version", "Baton's version", _json(Version)),
        OPENAPI_PATH: _get("openapi", "this document", _content("application/json", {})),
    }
    if is_managed_here:
        paths |= _management_paths()
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": __version__,
            "description": "OpenAI's completions, with prefill and decode on different workers.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _management_paths() -> Json:
    an_object = _content("application/json", {"type": "object"})
    return {
        METRICS_PATH: _get(
            "metrics", "metrics for Prometheus", _content("text/plain", {"type": "string"})
        ),
        REQUESTS_PATH: _get("list_requests", "the latest requests", an_object, "404"),
        REQUESTS_PATH + "/{id}": {
            "parameters": [_path_parameter("id", "as in the header x-request-id")],
            **_get("show_request", "a request's way and its times", an_object, "404"),
        },
        WORKERS_PATH: _get("list_workers", "the workers and their state", an_object, "404"),
        QUEUE_PATH: _get("show_queue", "requests that wait for a worker", an_object, "404"),
        DASHBOARD_PATH + "/": _get(
            "show_dashboard", "a page for operators", _content("text/html", {"type": "string"})
        ),
        DEMAND_PATH: _get("show_demand", "the traffic of each model", an_object, "404"),
        ROUTE_PATH: {
            "post": {
                "operationId": "explain_route",
                "summary": "Where a completion's body would go now, and why; nothing is placed",
                "parameters": _request_headers(),
                "requestBody": {"required": True, "content": an_object},
                "responses": _responses(an_object, "400", "401", "404", "413", "415", "503"),
            }
        },
        ALERTS_PATH: _get("list_alerts", "what is wrong with the fleet", an_object, "404"),
        LINKS_PATH: _get("list_links", "what handoffs cost, by distance", an_object, "404"),
        TRANSFERS_PATH: _get(
            "list_transfers", "what handoffs and links took, by pair", an_object, "404"
        ),
    }


def _schemas() -> Json:
    structs = (
        ChatCompletionRequest, CompletionRequest, ChatCompletion, Completion, ServedModel,
        ServedModels, Status, Version, ErrorBody, _VLLM_ONLY,
    )  # fmt: skip
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    vllm_only = schemas.pop("_VLLM_ONLY")["properties"]
    for request in ("ChatCompletionRequest", "CompletionRequest"):
        properties = schemas[request]["properties"]
        del properties["kv_transfer_params"]  # between Baton's processes
        properties["model"]["maxLength"] = MAX_MODEL_CHARS
        properties.update(vllm_only)
    del schemas["KVTransferParams"], schemas["Resume"]
    return schemas


def _completion(what: str, request: type, answer: type) -> Json:
    answers = _json(answer)
    answers["text/event-stream"] = {
        "schema": {
            "description": "with `stream`: events of `data: {chunk}`, at last `data: [DONE]`"
        }
    }
    responses = _responses(answers, "400", "401", "404", "413", "415", "429", "503")
    return {
        "post": {
            "operationId": f"create_{answer.__name__}",
            "summary": f"Go on from {what}",
            "parameters": _request_headers(),
            "requestBody": {"required": True, "content": _json(request)},
            "responses": responses,
            "security": [{"key": []}, {}],
        }
    }


def _request_headers() -> list[Json]:
    seconds = "milliseconds, a decimal number"
    return [
        _header(
            TTFT_HEADER,
            f"target of the time to first token, {seconds}; a request that would wait longer for a "
            "worker is refused at once",
            {"type": "number", "minimum": MIN_MS, "maximum": MAX_TTFT_MS},
        ),
        _header(
            TPOT_HEADER,
            f"target of the mean time per output token, {seconds}; for the policy `cost`",
            {"type": "number", "minimum": MIN_MS, "maximum": MAX_TPOT_MS},
        ),
        _header(
            ITL_HEADER,
            f"target of the gaps between tokens, all but 1 %, {seconds}; for the policy `cost`",
            {"type": "number", "minimum": MIN_MS, "maximum": MAX_TPOT_MS},
        ),
        _header(
            PRIORITY_HEADER,
            "a class below that of the API key",
            {"type": "string", "enum": list(get_args(Priority))},
        ),
    ]


def _get(operation_id: str, summary: str, content: Json, *errors: str) -> Json:
    return {
        "get": {
            "operationId": operation_id,
            "summary": summary,
            "responses": _responses(content, *errors),
        }
    }


def _responses(content: Json, *errors: str) -> Json:
    error = {"description": "what is wrong, and what to do", "content": _json(ErrorBody)}
    return {
        "200": {"description": "the answer", "content": content},
        **dict.fromkeys(errors, error),
        "default": error,
    }


def _json(struct: type) -> Json:
    return _content("application/json", {"$ref": f"#/components/schemas/{struct.__name__}"})


def _content(media_type: str, schema: Json) -> Json:
    return {media_type: {"schema": schema}}


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _path_parameter(name: str, description: str) -> Json:
    schema = {"type": "string", "minLength": 1}
    return {
        "name": name, "in": "path", "required": True, "schema": schema,
        "description": description,
    }  # fmt: skip
