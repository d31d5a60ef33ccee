"""HTTP between a gateway and its workers (docs/wire/worker-http.md): paths, headers, JSON bodies.

Used by both sides: the gateway, Baton's worker, and the control servers of vLLM's ranks. What a
sender constructs is not checked against the bounds; what a receiver decodes is.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton.ids import Epoch, TicketId, WorkerId
from baton.protocol.request_fields import TokenId

CHAT_COMPLETIONS_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
MODELS_PATH: Final = "/v1/models"
HEALTH_PATH: Final = "/health"
VERSION_PATH: Final = "/version"
METRICS_PATH: Final = "/metrics"
INFO_PATH: Final = "/baton/v1/info"
TRACES_PREFIX: Final = "/baton/v1/traces/"
KV_EVENTS_PREFIX: Final = "/baton/v1/kv_events/"
"""Before the number of the last event that who asks knows."""
MAX_KV_EVENTS_BYTES: Final = 64 << 20
LINKS_PATH: Final = "/baton/v1/links"
MAX_LINKS: Final = 1024
"""That one worker reports, of those that it used last."""
TRANSFERS_PATH: Final = "/baton/v1/transfers"
HANDOFFS_PREFIX: Final = "/baton/v1/handoffs/"
ABORT_SUFFIX: Final = "/abort"
FIRST_TOKEN_SUFFIX: Final = "/first_token"  # noqa: S105 - a path
STANDBYS_PREFIX: Final = "/baton/v1/standbys/"
TOKENS_SUFFIX: Final = "/tokens"
MAX_NEXT_TOKENS_BYTES: Final = 1 << 20
MULTIPLEX_PATH: Final = "/baton/v1/multiplex"
LEAVE_MULTIPLEX_PATH: Final = "/baton/v1/multiplex/leave"
MAX_STREAM_REF_BYTES: Final = 64

REQUEST_ID_HEADER: Final = "x-request-id"
TIMEOUT_HEADER: Final = "x-baton-timeout-s"
"""Seconds left for the request, a decimal number."""
CREATED_HEADER: Final = "x-baton-created"
"""Unix seconds, written into the answers of both workers as their time of creation."""
TOKEN_IDS_HEADER: Final = "x-baton-token-ids"  # noqa: S105 - a header
"""`1` asks for the ids of a stream's tokens in comments; answers that have them carry it, too."""
PROMPT_TOKENS_HEADER: Final = "x-baton-prompt-tokens"
"""Of a stream whose tokens' ids were asked for: how many tokens its prompt has."""
FIRST_TOKEN_AGE_HEADER: Final = "x-baton-first-token-s-ago"  # noqa: S105 - a header
"""Of an answer in one piece: seconds since its first token, of which it shows nothing else."""
MOVE_HEADER: Final = "x-baton-moves-stream"
"""`1`: the request hands a stream's KV over, which a draining vLLM server serves, too."""
SEED_HEADER: Final = "x-baton-seed"
"""For requests that have none: a number below 2^63. A vLLM server that samples with it, so that the
same request gives the same answer elsewhere, answers with it."""
MAX_SEED_DIGITS: Final = 19
MULTIPLEX_HEADER: Final = "x-baton-multiplex"
"""Of a request whose stream may come with others over one connection, `ID.NUMBER`; of an answer
that does, and of that connection's own, `ID`."""

END_OF_STREAM: Final = b"data: [DONE]\n\n"
"""The last event of an answer that is streamed."""

MAX_ABORT_BYTES: Final = 4096
MAX_REASON_CHARS: Final = 500
EPOCH_CHARS: Final = 32
MAX_RANKS: Final = 32
"""Of tensor parallelism: above it, the addresses of all ranks would not fit into a ticket."""

WorkerProtocol: TypeAlias = Literal["baton", "vllm"]
"""How a worker is asked: as a Baton worker, or as vLLM's own server with Baton's connector."""

NAME: Final = Meta(min_length=1, max_length=256)
Name: TypeAlias = Annotated[str, NAME]
RANKS: Final = Meta(max_length=MAX_RANKS)


Topology: TypeAlias = Annotated[
    str, Meta(max_length=512, pattern=r"^[A-Za-z0-9._:-]*(?:/[A-Za-z0-9._:-]*){0,3}\Z")
]


def read_seed(text: bytes) -> int | None:
    """The value of `SEED_HEADER`; None if it is no number."""
    is_number = text.isdigit() and len(text) <= MAX_SEED_DIGITS
    return int(text) % 2**63 if is_number else None


def trace_path(request_id: str) -> str:
    """Where the trace of a request is, percent-encoded."""
    return TRACES_PREFIX + quote(request_id, safe="")


def abort_path(ticket: TicketId) -> str:
    """Where a worker is asked to abort a handoff."""
    return HANDOFFS_PREFIX + ticket.hex() + ABORT_SUFFIX


def first_token_path(ticket: TicketId) -> str:
    """Where the decode worker is asked to continue from the prefill worker's first token."""
    return HANDOFFS_PREFIX + ticket.hex() + FIRST_TOKEN_SUFFIX


def standby_path(standby: str) -> str:
    """Where a standby request gets the tokens that another worker has sampled."""
    return STANDBYS_PREFIX + standby + TOKENS_SUFFIX


class Role(StrEnum):
    """What a worker was started to do. `BOTH` prefills and decodes its own requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class KVEventsSource(msgspec.Struct, frozen=True):
    """Where a worker publishes the blocks that its prefix cache stores and removes (ZMQ)."""

    endpoint: Name
    replay_endpoint: Name | None = None
    topic: Annotated[str, Meta(max_length=256)] = ""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /baton/v1/info`: what the gateway needs for tickets and placement.

    `layout` is a `baton.kv.layout.KVLayout`, for people; the gateway does not read it.
    `control_urls` has one address for each tensor-parallel rank of a vLLM server, where that rank
    is asked what a Baton worker is asked at its own address; a Baton worker has none. Of `modes`,
    unknown ones are ignored. `has_kv_journal`: it answers at `KV_EVENTS_PREFIX`; a vLLM server does
    at the first of its control servers, and reports there of its store alone. `relays_kv_events`: a
    vLLM server answers there at its own address, too, and passes on the `kv_events` of its cache.
    `has_standby`: it takes `Resume.standby`.
    `tokenizer` is the digest of tokenizer and chat template (`digest_tokenizer`).
    `max_prompt_chars`: no longer text can fit the context, as far as the
    worker knows its tokenizer's longest token. `max_step_tokens`: of prompts and answers together,
    its engine computes so many in one step. `num_landing_layers`: layers of the model, where the
    engine computes the rest of a prompt while KV of its beginning lands, layer by layer.
    `takes_unsigned_tickets`: it knows by the connection that a gateway sends one, and needs no
    signature. Of a vLLM server, as Baton's workers do: `resumes_streams`: it goes on with streams
    from token ids; `takes_prefixes`: it computes, and takes KV of, a prompt's first tokens alone.
    `multiplexes_streams`: it answers at `MULTIPLEX_PATH`. `topology` is `zone/rack/host/device`,
    levels that are not known empty, or left out at the end.
    """

    worker: Annotated[WorkerId, NAME]
    epoch: Annotated[Epoch, Meta(min_length=EPOCH_CHARS, max_length=EPOCH_CHARS)]
    role: Role
    model: str = ""
    served_model_name: Name
    fingerprint: Name
    max_context_tokens: Annotated[int, Meta(gt=0)]
    max_prompt_chars: Annotated[int, Meta(gt=0)] | None = None
    max_step_tokens: Annotated[int, Meta(gt=0)] | None = None
    num_landing_layers: Annotated[int, Meta(ge=0, le=4096)] = 0
    handoff_address: Name
    layout: object = None
    transports: Annotated[tuple[str, ...], Meta(max_length=64)]
    version: Name
    protocol: WorkerProtocol = "baton"
    engine: Name | None = None
    rank_addresses: Annotated[tuple[Name, ...], RANKS] = ()
    control_urls: Annotated[tuple[Name, ...], RANKS] = ()
    kv_events: KVEventsSource | None = None
    has_kv_journal: bool = False
    relays_kv_events: bool = False
    has_standby: bool = False
    takes_unsigned_tickets: bool = False
    resumes_streams: bool = False
    takes_prefixes: bool = False
    multiplexes_streams: bool = False
    tokenizer: Name | None = None
    modes: Annotated[tuple[str, ...], Meta(max_length=16)] = ("push",)
    topology: Topology = ""

    def __post_init__(self) -> None:
        if self.rank_addresses and self.rank_addresses[0] != self.handoff_address:
            raise ValueError("the first of rank_addresses must be handoff_address")
        num_controls = max(1, len(self.rank_addresses)) if self.protocol == "vllm" else 0
        if len(self.control_urls) != num_controls:
            raise ValueError(f"control_urls must have {num_controls} entries")


SPLIT_UNIT: Final = 64
"""Tokens: of a prompt that is split between two workers, the first part is a multiple of it."""
MAX_SPLIT_TOKENS: Final = 4096
"""A worker with `num_landing_layers` and no answers computes such a part in one step."""


class StoreLoads(msgspec.Struct, frozen=True):
    """KV that a worker has loaded from the store since its start.

    `seconds` is the sum of what the requests waited for it, each from its order on. A load that was
    given up because the store did not answer in time has no tokens.
    """

    num_loads: Annotated[int, Meta(ge=0)]
    num_tokens: Annotated[int, Meta(ge=0)]
    seconds: Annotated[float, Meta(ge=0)]


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's queue and KV blocks. A block that is only cached is free.

    `max_running`: requests that its engine works on at once, where they have blocks.
    """

    num_waiting: Annotated[int, Meta(ge=0)]
    num_blocks: Annotated[int, Meta(gt=0)]
    num_free_blocks: Annotated[int, Meta(ge=0)]
    block_size: Annotated[int, Meta(gt=0)]
    max_running: Annotated[int, Meta(gt=0)] | UnsetType = UNSET
    store_loads: StoreLoads | UnsetType = UNSET


class MeasuredLink(msgspec.Struct, frozen=True):
    """One direction of the way to a peer: what a transfer of pages is predicted to take.

    `push`: to the peer; `pull`: from it. `latency_s + bytes * byte_s`, of the transport that large
    transfers take, from so many probes and transfers; `encoding` is the latest handoff's. Where
    that is not raw, a byte of raw KV takes `kv_byte_s`, encoding and decoding included.
    """

    peer: Name
    direction: Literal["push", "pull"]
    transport: Name
    latency_s: Annotated[float, Meta(ge=0, le=3600)]
    byte_s: Annotated[float, Meta(gt=0, le=1)]
    num_probes: Annotated[int, Meta(ge=0)]
    num_transfers: Annotated[int, Meta(ge=0)]
    encoding: Name = "raw"
    kv_byte_s: Annotated[float, Meta(gt=0, le=1)] | None = None


class MeasuredLinks(msgspec.Struct, frozen=True):
    """`GET /baton/v1/links`: those links of a worker (of vLLM: of a rank) that were measured."""

    links: Annotated[tuple[MeasuredLink, ...], Meta(max_length=MAX_LINKS)]


class ClockReading(msgspec.Struct, frozen=True):
    """What a worker's monotonic clock shows. Clocks of one `domain` are the same clock."""

    domain: Name
    at_s: float


class Health(msgspec.Struct, frozen=True):
    """`GET /health`. `reason` is given when the status is not ok; `load` where it is known.

    `preempted_in_s`: of a worker whose machine will be taken, seconds until then. `clock`: read
    while the answer was made; the instants of its traces are on that clock. `why_no_handoffs`: of a
    worker that is well, why it refuses all handoffs in this incarnation.
    """

    status: str = "ok"
    reason: str | None = None
    load: WorkerLoad | None = None
    preempted_in_s: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    clock: ClockReading | UnsetType = UNSET
    why_no_handoffs: str | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    """`GET /version`: the version of the package."""

    version: str


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of OpenAI's list of models. `parent` is the model of a LoRA adapter."""

    id: str
    max_model_len: int
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "baton"
    parent: str | UnsetType = UNSET


class ServedModels(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`: OpenAI's list of models."""

    data: tuple[ServedModel, ...]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's four fields. vLLM's codes are HTTP's, and numbers."""

    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None

    def __str__(self) -> str:
        """Code and message, for a log."""
        known = (str(part) for part in (self.code, self.message) if part is not None)
        return ": ".join(known)[:MAX_REASON_CHARS]


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object: the body of every error."""

    error: ErrorDetail


class AbortOrder(msgspec.Struct, frozen=True):
    """The body of an abort: why the other part of a handoff is not coming."""

    reason: str


class FirstToken(msgspec.Struct, frozen=True):
    """A first token (`baton.handoff.interface.SampledToken`), and the stream's first events."""

    token: msgspec.Raw
    events: Annotated[str, Meta(min_length=1, max_length=1 << 20)]


class NextTokens(msgspec.Struct, frozen=True):
    """`POST /baton/v1/standbys/{standby}/tokens`: tokens that the client got meanwhile.

    They are the answer's from number `start` on. Without `generates` the reply comes when their KV
    is computed. With it the reply comes at once, and the standby's stream begins behind them.
    """

    start: Annotated[int, Meta(ge=0)]
    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    generates: bool = False


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker's answer: the KV and the first token are with the decode worker.

    `first` is present where the ticket asks for `first_token_early`; None: the token ends the
    answer, or nothing is streamed. `computed_s_ago`: since when the prompt's KV is computed.
    """

    object: str = "baton.prefill"
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_s_ago: Annotated[float, Meta(ge=0)] = 0.0
    first: FirstToken | UnsetType | None = UNSET
