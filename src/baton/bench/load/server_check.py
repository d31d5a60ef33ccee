"""Checks of a server before a run: its model, how requests look, whether the largest one fits.

What cannot work fails here with the reason, not after an hour.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

import aiohttp
import msgspec

from baton.bench.load.client import BodyWriter, Client, Exchange, RequestStyle, read_body
from baton.bench.workloads.requests import (
    Endpoint,
    GivenBody,
    Request,
    Segment,
    Segments,
    count_context,
)
from baton.bench.workloads.synthetic import Calibration, PromptWriter, TokenIds, calibrate
from baton.errors import UNDECODABLE, BatonError, ConfigError, PeerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.bench.workloads.requests import Workload

PromptForm = Literal["auto", "tokens", "words"]

CHECK_TIMEOUT_S: Final = 15.0
MAX_ANSWER_BYTES: Final = 1 << 20
CALIBRATION_WORDS: Final = (64, 576)
GUESS: Final = Calibration(1.3, 0.0)
MOST_DEVIATION: Final = 0.05
MOST_LISTED: Final = 10
REPEATED_TEXTS: Final = (
    "the trace has texts of its own: its largest prompt and those of the warm-up are sent before "
    "they are measured, so a prefix cache has them (--warm-up 0 leaves only the largest)"
)
UNAUTHORISED: Final = frozenset({401, 403})


class UnusableServerError(BatonError):
    """The server answers, but not the requests of this run."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The flags that shape requests. `model` None: the one that the server has."""

    model: str | None = None
    endpoint: Endpoint = "completions"
    form: PromptForm = "auto"
    ids: TokenIds = field(default_factory=TokenIds)


class Server(msgspec.Struct, frozen=True):
    """Facts about a server; None: unknown."""

    url: str
    model: str
    endpoint: Endpoint
    prompts: str
    has_exact_lengths: bool
    context_tokens: int | None = None
    version: str | None = None
    software: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedServer:
    """A usable server: the style of its requests, and warnings."""

    server: Server
    style: RequestStyle
    warnings: tuple[str, ...]


class ListedModel(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The answer of `/v1/models`."""

    data: tuple[ListedModel, ...]


class VersionAnswer(msgspec.Struct, frozen=True):
    """The answer of `/version`, where there is one."""

    version: str


@dataclass(frozen=True, slots=True)
class _Listing:
    models: tuple[ListedModel, ...] | None
    version: str | None
    software: str | None


async def check_server(
    client: Client, workload: Workload, request_options: RequestOptions, prompts: PromptWriter
) -> CheckedServer:
    """Find out how requests of this workload must look for this server.

    Raises:
        PeerUnreachableError: nothing answers there.
        ConfigError: no such model, a key is missing, or the workload does not fit.
        UnfitServerError: it cannot answer.
    """
    listing = await _list(client)
    model = _choose_model(listing.models, request_options.model)
    _check_context(model, workload)
    style, warnings = await _find_style(client, model, workload, request_options, prompts=prompts)
    probe = await _probe_largest(client, workload, BodyWriter(style, prompts), model)
    server = Server(
        client.target.base_url,
        model.id,
        _endpoint_of(workload, request_options),
        "token ids" if isinstance(style.form, TokenIds) else "words",
        style.has_exact_lengths,
        model.max_model_len,
        listing.version,
        listing.software,
    )
    lengths = tuple(_length_warnings(probe, workload.largest, style))
    return CheckedServer(server, style, (*workload.warnings, *warnings, *lengths))


async def _list(client: Client) -> _Listing:
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    url = client.target.models_url
    try:
        async with client.session.get(url, timeout=timeout) as response:
            if response.status in UNAUTHORISED:
                raise ConfigError(
                    f"{url}: HTTP {response.status}: the server wants a key; put it into the "
                    "environment variable OPENAI_API_KEY (or name another: --api-key-env)"
                )
            body = await read_body(response, MAX_ANSWER_BYTES)
            software = response.headers.get("Server")
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        message = str(exc) or "no answer in time"
        raise PeerUnreachableError(
            f"no server answers at {client.target.base_url}: {message}. Is it up, and is this its "
            "address? (`baton up` prints its own)"
        ) from exc
    try:
        models = msgspec.json.decode(body, type=ModelList).data
    except UNDECODABLE:
        models = None
    return _Listing(models, await _read_version(client), software)


async def _read_version(client: Client) -> str | None:
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    try:
        async with client.session.get(
            f"{client.target.base_url}/version", timeout=timeout
        ) as response:
            body = await read_body(response, MAX_ANSWER_BYTES)
        return msgspec.json.decode(body, type=VersionAnswer).version[:100]
    except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE):
        return None


def _choose_model(models: tuple[ListedModel, ...] | None, wanted: str | None) -> ListedModel:
    if not models:
        if wanted is None:
            raise ConfigError("the server lists no models: name one (--model)")
        return ListedModel(wanted)
    names = ", ".join(model.id for model in models[:MOST_LISTED])
    if wanted is None:
        if len(models) > 1:
            raise ConfigError(f"the server has several models: name one (--model): {names}")
        return models[0]
    found = next((model for model in models if model.id == wanted), None)
    if found is None:
        raise ConfigError(f"--model {wanted}: the server does not serve it; it serves {names}")
    return found


def _check_context(model: ListedModel, workload: Workload) -> None:
    needed = count_context(workload.largest)
    if needed is None or model.max_model_len is None or needed <= model.max_model_len:
        return
    ask = workload.largest
    raise ConfigError(
        f"the workload does not fit: its largest request has {ask.num_prompt_tokens} tokens in and "
        f"{ask.num_output_tokens} out, and the context of {model.id} holds {model.max_model_len}; "
        "ask for less (--input-len, --output-len; of a trace --divide-lengths)"
    )


async def _find_style(
    client: Client,
    model: ListedModel,
    workload: Workload,
    request_options: RequestOptions,
    *,
    prompts: PromptWriter,
) -> tuple[RequestStyle, list[str]]:
    """The first style that the server accepts, and its warnings."""
    first = RequestStyle(model.id, request_options.endpoint, request_options.ids)
    if isinstance(workload.largest.prompt, GivenBody):
        return first, [REPEATED_TEXTS]
    refusals: list[str] = []
    for style in _styles(first, request_options):
        ready = style
        if isinstance(style.form, Calibration):
            ready = replace(style, form=await _calibrate(client, style, prompts))
        ask = Request(Segments((Segment("check", 16),)), 2)
        found = await client.exchange(BodyWriter(ready, prompts).prepare(ask))
        if found.failure is None:
            return ready, _style_warnings(ready, request_options, refusals)
        if not _is_refusal(found):
            raise UnusableServerError(f"a first small request failed: {found.failure.message}")
        refusals.append(found.failure.message)
    raise ConfigError(f"the server refuses a first small request: {refusals[0]}")


def _styles(first: RequestStyle, request_options: RequestOptions) -> Iterator[RequestStyle]:
    """All styles, the most exact one first."""
    forms: list[TokenIds | Calibration] = []
    if request_options.endpoint == "completions" and request_options.form != "words":
        forms.append(request_options.ids)
    if request_options.form != "tokens":
        forms.append(GUESS)
    if not forms:
        raise ConfigError("--prompts tokens: chats take text only; use --endpoint completions")
    for form in forms:
        for has_exact_lengths in (True, False):
            yield replace(first, form=form, has_exact_lengths=has_exact_lengths)


def _style_warnings(
    style: RequestStyle, request_options: RequestOptions, refusals: list[str]
) -> list[str]:
    warnings = []
    message = f" (its answer: {refusals[0]})" if refusals else ""
    if not style.has_exact_lengths:
        warnings.append(
            f"the server refuses ignore_eos: answers may be shorter than asked{message}"
        )
    is_auto = request_options.endpoint == "completions" and request_options.form == "auto"
    if is_auto and isinstance(style.form, Calibration):
        warnings.append(f"the server refuses token ids: prompts are words{message}")
    if style.form == GUESS:
        warnings.append("the server counts no tokens (usage): prompts' lengths are guesses")
    return warnings


async def _calibrate(client: Client, style: RequestStyle, prompts: PromptWriter) -> Calibration:
    """Tokens per word of this server, by two prompts; a guess where it counts none."""
    per_word = BodyWriter(replace(style, form=Calibration(1.0, 0.0)), prompts)
    counted = []
    for num_words in CALIBRATION_WORDS:
        ask = Request(Segments((Segment(f"calibrate/{num_words}", num_words),)), 1)
        found = await client.exchange(per_word.prepare(ask))
        if found.answer.tokens.num_prompt is None:
            return GUESS
        counted.append(found.answer.tokens.num_prompt)
    return calibrate(CALIBRATION_WORDS, (counted[0], counted[1])) or GUESS


async def _probe_largest(
    client: Client, workload: Workload, writer: BodyWriter, model: ListedModel
) -> Exchange:
    found = await client.exchange(writer.prepare(workload.largest))
    if found.failure is not None:
        message = found.failure.message
        if _is_refusal(found):
            raise ConfigError(f"the server refuses the workload's largest request: {message}")
        raise UnusableServerError(f"{model.id} fails at the workload's largest request: {message}")
    return found


def _is_refusal(found: Exchange) -> bool:
    return found.status is not None and 400 <= found.status < 500  # noqa: PLR2004 - HTTP's range


def _length_warnings(probe: Exchange, ask: Request, style: RequestStyle) -> Iterator[str]:
    tokens = probe.answer.tokens
    if tokens.num_output is None:
        yield "the server counts no tokens (usage): each chunk is taken for one token"
    elif style.has_exact_lengths and ask.num_output_tokens not in {None, tokens.num_output}:
        yield f"asked for {ask.num_output_tokens} tokens, the server gave {tokens.num_output}"
    wanted = ask.num_prompt_tokens
    if wanted and tokens.num_prompt and abs(tokens.num_prompt / wanted - 1) > MOST_DEVIATION:
        yield f"a prompt of {wanted} tokens was counted as {tokens.num_prompt} by the server"


def _endpoint_of(workload: Workload, request_options: RequestOptions) -> Endpoint:
    prompt = workload.largest.prompt
    return prompt.endpoint if isinstance(prompt, GivenBody) else request_options.endpoint
