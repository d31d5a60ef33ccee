"""Every decoder of bytes that come from outside the process, one line each at the end.

A target returns a value or raises one of its documented errors, whatever bytes it is given. What a
decoder hands on to further checks (packed pages, ranges, digests) is read as its caller reads it.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime as dt
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

import msgspec
import numpy as np
from xxhash import xxh3_128_digest
from yarl import URL

from baton.auth.certificates import Trust, derive_authority
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.replay import TicketUse, UsedTickets
from baton.auth.sealed import SealedMessage, encode_sealed
from baton.auth.ticket import Ticket, TicketIssue, WorkerRef, seal, unseal
from baton.bench.compare import _read as read_report
from baton.bench.load.stream import Answer, EventParser
from baton.bench.load.stream import read_error as read_stream_error
from baton.bench.workloads.traces import (
    AzureReader,
    BatchReader,
    BrokenLineError,
    MooncakeReader,
)
from baton.clock import Instant, MachineClock
from baton.config import resolve
from baton.engines.vllm.identity import Identity
from baton.engines.vllm.options import read_options
from baton.engines.vllm.serving import read_identity
from baton.engines.vllm.tickets import TicketReader as VllmTicketReader
from baton.errors import (
    AuthenticationError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    ProtocolError,
    TicketError,
    TransferError,
)
from baton.events.blocks import (
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    EventDomain,
    TiersListed,
    WorkerBlockIndex,
    pack_ids,
    pack_names,
)
from baton.events.journal import BATON_HASHES, JournalPage
from baton.events.sequence import Deliver, Sequencer
from baton.events.wire import decode_message, decode_page, decode_replayed, encode_page
from baton.gateway import protocol_adapters
from baton.gateway.clients import ClientKeyFile, Clients, make_key, read_keys
from baton.gateway.errors import UnauthorizedError
from baton.gateway.kv_events import locate_events
from baton.gateway.members.endpoint_slices import (
    ServiceWorkers,
    SlicePut,
    decode_event,
)
from baton.gateway.members.endpoint_slices import decode_page as decode_slices
from baton.gateway.members.file import read_addresses
from baton.gateway.members.heartbeat_table import HeartbeatTable
from baton.gateway.members.member_set import MemberSet
from baton.gateway.options import WorkerAddress
from baton.gateway.request import (
    estimate_prompt_tokens,
    find_non_disaggregable_field,
    parse_body,
    request_id_from,
)
from baton.gateway.stream_record import RecordBudget, StreamRecord
from baton.gateway.stream_replay import Replay
from baton.gateway.targets import MAX_TPOT_MS, MAX_TTFT_MS, read_targets
from baton.gateway.upstream import read_error
from baton.gateway.worker_discovery import _read_models
from baton.gateway.worker_info import read_health, read_info, why_not_used
from baton.gateway.workers import Worker, worker_view
from baton.handoff import messages
from baton.handoff.interface import SampledToken
from baton.handoff.pool_mode.side_entries import (
    CompletionMarker,
    HeartbeatEntry,
    _heartbeat_decoder,
    _marker_decoder,
    read_side_entry,
)
from baton.handoff.token_ranges import unpack_ranges
from baton.ids import Epoch, TicketId, WorkerId
from baton.kv.prefix_names import PrefixNames
from baton.kv.sizing.config import read_config
from baton.kv.sizing.families import read_shape
from baton.launch.control_messages import decode_answer, decode_request
from baton.launch.gateways import find_model, find_requests, find_up
from baton.net import framing
from baton.ops import gateway_pages
from baton.ops.doctor import fleet
from baton.planner.links import read_links
from baton.protocol import announcements
from baton.protocol.announcements import AnnouncementError
from baton.protocol.heartbeats import (
    Acknowledgement,
    HeartbeatGrant,
    make_acknowledgement,
    make_heartbeat,
    make_renewal,
    read_acknowledgement,
)
from baton.protocol.worker_http import FirstToken, NextTokens, PrefillReply, Role
from baton.rig import backend
from baton.rig.transport import PageAnnouncement, decode_announcement, map_announced
from baton.router.health import DEFAULT_HEALTH
from baton.router.prefixes import ModelPrefixes
from baton.store.entry_format import DIGEST_BYTES, HEADER_BYTES, make_header, read_header
from baton.store.interface import EntryName
from baton.store.peer.wire import (
    FindEntries,
    Found,
    ListedValue,
    ListEntries,
    Listing,
    NoRoom,
    PutEntry,
    ReportStatus,
    Status,
    Stored,
    UseEntry,
    Value,
    answer_decoder,
    request_decoder,
)
from baton.telemetry.process_status import read_status
from baton.telemetry.trace import RequestSpan
from baton.telemetry.trace_context import begin_span, read_context
from baton.transfer.devices.table import (
    COPY_BYTES,
    Extent,
    LockPlace,
    Table,
    read_table,
    write_table,
)
from baton.transfer.endpoints import parse_endpoint
from baton.transfer.grant_messages import GrantOpened, unpack_pages
from baton.transfer.interface import PageArray
from baton.transfer.onesided import wire as onesided
from baton.transfer.region import check_arrays
from baton.transfer.scatter_gather import compute_runs, unpack_geometry, unpack_target
from baton.transfer.transports.cuda_ipc.session import (
    ArrayLocation,
    CudaIpcMetadata,
    decode_metadata,
)
from baton.transfer.transports.file import wire as file_wire
from baton.transfer.transports.mooncake.session import MooncakeMetadata
from baton.transfer.transports.mooncake.session import _metadata as mooncake_metadata
from baton.transfer.transports.nixl.session import NixlMetadata
from baton.transfer.transports.nixl.session import _metadata as nixl_metadata
from baton.transfer.transports.shared import wire as shared
from baton.transfer.transports.tcp import wire as tcp
from baton.worker.errors import UnknownPathError
from baton.worker.fields import parse_chat, parse_completion
from baton.worker.standby import read_next_tokens
from baton.worker.status_pages import _read_abort, _read_ticket_id, _read_token
from tests.fuzz.peers import run_episode
from tests.fuzz.transfers import run_transfer
from tests.tickets import issue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.events.blocks import FeedEvent
    from tests.fuzz.mutation import Form

KEY: Final = Credentials.of(ClusterKey(bytes(range(32))))
AUTHORITY: Final = derive_authority(KEY.key)
NOW: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
VECTORS: Final = Path(__file__).parent.parent / "vectors"
REPOSITORY: Final = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Target:
    """One decoder. `encode`, where there is one, must give bytes that decode to the same value.

    `weight`: its share of all inputs, where others have 1. `chunk`: inputs that follow from one
    seed. `max_s`: processor time of one input, several times what the largest one takes.
    """

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    form: Form = "msgpack"
    encode: Callable[[Any], bytes] | None = None
    weight: float = 1.0
    chunk: int = 5_000
    max_s: float = 1.0


def check(target: Target, data: bytes) -> str:
    """Decode one input; what came of it, in words: those of the target, if it returns text.

    Raises:
        Exception: whatever the target does not document.
        AssertionError: what was encoded again decodes to something else.
    """
    try:
        value = target.decode(data)
    except target.errors as exc:
        return f"{type(exc).__name__}: {exc}"
    if target.encode is not None and value is not None:
        again = target.encode(value)
        assert target.encode(target.decode(again)) == again, "it changes when it is encoded again"
    return value if isinstance(value, str) else type(value).__name__


def answers(errors: tuple[type[Exception], ...], *reads: Callable[[], object]) -> str:
    """What each of these answers, in words; an error of one is no error of another."""
    found: list[str] = []
    for read in reads:
        try:
            value = read()
            found.append(value if isinstance(value, str) else type(value).__name__)
        except errors as exc:
            found.append(f"{type(exc).__name__}: {exc}"[-60:])
    return "; ".join(found)


class MemoryFile:
    """What readers of files use of a `Path`."""

    def __init__(self, data: bytes) -> None:
        self._data, self.parent, self.st_size = data, Path("/"), len(data)

    def __str__(self) -> str:
        return "FILE"

    def stat(self) -> MemoryFile:
        return self

    def read_bytes(self) -> bytes:
        return self._data

    def read_text(self, encoding: str) -> str:
        return self._data.decode(encoding)


def of_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    return lambda data: read(cast("Path", MemoryFile(data)))


def seeds_of(*values: object) -> tuple[bytes, ...]:
    return tuple(framing.encode(cast("msgspec.Struct", value)) for value in values)


def json_of(*values: object) -> tuple[bytes, ...]:
    return tuple(msgspec.json.encode(value) for value in values)


# HTTP bodies ----------------------------------------------------------------

MAX_CONTEXT_TOKENS: Final = 4096
COMPLETION: Final = {
    "model": "m", "prompt": "Once", "max_tokens": 5, "stream": True, "temperature": 0.5, "seed": 1,
    "stop": ["a", "b"], "stop_token_ids": [1, 2], "logprobs": 3, "cache_salt": "s", "n": 1,
    "stream_options": {"include_usage": True}, "top_k": -1, "top_p": 0.9, "min_tokens": 1,
}  # fmt: skip
CHAT: Final = {
    "model": "m", "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2,
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ],
    "chat_template_kwargs": {"thinking": False}, "tools": [], "tool_choice": "none",
    "response_format": {"type": "text"},
}  # fmt: skip
TICKET_PARAMS: Final = {"kv_transfer_params": {"baton_ticket": "abc", "do_remote_decode": True}}
BODIES: Final = json_of(
    COMPLETION,
    COMPLETION | {"prompt": [1, 2, 3]} | TICKET_PARAMS,
    COMPLETION | {"prompt": [[1, 2], [3]], "vllm_xargs": TICKET_PARAMS},
    COMPLETION | {"prompt": ["a", "b"], "echo": False, "use_beam_search": None},
)
CHATS: Final = json_of(CHAT, CHAT | TICKET_PARAMS)


def read_gateway_body(body: bytes, tenant: str = "") -> bytes:
    parsed = parse_body(body, tenant)
    parsed.check_ids(lambda: MAX_CONTEXT_TOKENS)
    assert len(parsed.cache_salt) <= len(body) + 64
    find_non_disaggregable_field(parsed)
    estimate_prompt_tokens(parsed)
    for text in (
        parsed.encode_with_ticket("TICKET"),
        protocol_adapters.decode_body(parsed, "TICKET"),
        protocol_adapters.prefill_body(parsed, "TICKET"),
    ):
        sent = json.loads(text)  # it is JSON, and nothing but ours is in the field
        assert sent["kv_transfer_params"]["baton_ticket"] == "TICKET"
        assert "ec_transfer_params" not in sent
    sent = json.loads(parsed.encode())
    assert "kv_transfer_params" not in sent
    return parsed.encode()


CHUNKS: Final = json_of(
    {"id": "a", "created": 1, "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
    {"choices": [{"text": "c", "logprobs": {"tokens": ["c"]}, "finish_reason": "stop"}]},
    {"choices": [{"index": 0, "logprobs": {"content": [{"token": "a"}]}, "delta": {
        "content": "ab", "tool_calls": [{"index": 0, "id": "x", "function": {"name": "f"}}]}}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
    {"error": {"message": "x", "type": "y"}},
)  # fmt: skip
STREAMS: Final = (
    b"".join(b"data: " + chunk + b"\n\n" for chunk in CHUNKS[:4]) + b"data: [DONE]\n\n",
    b"".join(b":%d\ndata: %b\n\n" % (number, chunk) for number, chunk in enumerate(CHUNKS)),
)


def go_on_with_stream(data: bytes) -> object:
    """A stream that is cut after each of its chunks, and answered by itself from its start."""
    chunks = [data[at : at + 100] for at in range(0, len(data), 100)]
    budget = RecordBudget(1 << 20)
    for has_ids, has_events in ((False, True), (True, False), (True, True)):
        record = StreamRecord(budget, MAX_EVENT_BYTES)
        record.begin(has_ids=has_ids, has_events=has_events)
        sent = b"".join(map(record.take, chunks))
        assert len(sent) <= len(data)
        record.read_token_ids()
        assert record.is_finished in {False, True}
        if has_events:
            record.begin(has_ids=has_ids, has_events=True, replay=Replay(record.events))
            list(map(record.take, chunks))
        record.close()
    assert budget.num_bytes == 0
    return type(record.failure)


MAX_EVENT_BYTES: Final = 10_000


def read_headers(data: bytes) -> object:
    headers = [
        (b"x-request-id", data), (b"traceparent", data), (b"tracestate", data[::-1]),
    ]  # fmt: skip
    request_id = request_id_from(headers)
    assert request_id.isascii()
    assert request_id.isprintable()
    span = begin_span(read_context(headers), is_sampled=False)
    for line in span.headers.split(b"\r\n"):
        assert line.decode("ascii").isprintable()
    return None


def read_target_headers(data: bytes) -> object:
    name, _, value = data.partition(b"=")
    targets = read_targets([(b"x-baton-" + name, value)])
    assert targets.ttft_s is None or 0 < targets.ttft_s <= MAX_TTFT_MS / 1000
    assert targets.tpot_s is None or 0 < targets.tpot_s <= MAX_TPOT_MS / 1000
    assert targets.itl_s is None or 0 < targets.itl_s <= MAX_TPOT_MS / 1000
    return (targets.ttft_s, targets.tpot_s, targets.itl_s, targets.priority)


CLIENT_TEXT, CLIENT_KEY = make_key("acme", max_inflight=3, requests_per_minute=7, expires_at=1)
_CLIENTS: list[Clients] = []


def authenticate(data: bytes) -> None:
    if not _CLIENTS:
        _CLIENTS.append(Clients(None, MachineClock()))
        _CLIENTS[0]._path = Path("/dev/null")
        _CLIENTS[0]._take((CLIENT_KEY,))
        _CLIENTS[0]._reload = lambda: None  # type: ignore[method-assign]
    client = _CLIENTS[0].authenticate([(b"authorization", data)])
    assert client.key is CLIENT_KEY


def read_control_body(body: bytes) -> str:
    return answers(
        (InvalidRequestError, UnknownPathError),
        lambda: _read_abort(body),
        lambda: _read_token(body, 100),
        lambda: _read_ticket_id(body.decode("latin-1")),
        lambda: read_next_tokens(body),
    )


# Tickets --------------------------------------------------------------------

TICKET: Final = Ticket(
    TicketId(bytes(range(16))),
    "req-1",
    WorkerRef(WorkerId("p"), Epoch("0" * 32), "127.0.0.1:1"),
    WorkerRef(WorkerId("d"), Epoch("1" * 32), "127.0.0.1:2", ("127.0.0.1:2", "127.0.0.1:3")),
    "push",
    msgspec.structs.replace(issue(600.0), issuer=Epoch("2" * 32)),
    tenant_salt="salt",
)


_issues: Final = msgspec.msgpack.Decoder(list[TicketIssue])


def use_tickets(body: bytes) -> str:
    """Tickets in any order, with any numbers: each is good once, whatever came between."""
    used, good, found = UsedTickets(window=64, max_issuers=3), set[TicketIssue](), list[str]()
    for ticket in framing.decode(_issues, body)[:64]:
        use = used.use(ticket)
        assert use is not TicketUse.FIRST or ticket not in good
        assert used.use(ticket) is not TicketUse.FIRST
        if use is TicketUse.FIRST:
            good.add(ticket)
        if len({each.issuer for each in good}) > 3:  # one is forgotten
            good.clear()
        found.append(use)
    return " ".join(found[:6])


def sign(body: bytes) -> bytes:
    signer = KEY.signer
    parts = [body, signer.certificate, signer.sign(b"baton/ticket/2|" + body)]
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).rstrip(b"=")


def read_signed_announcement(body: bytes) -> object:
    sealed = SealedMessage.sign(b"baton/announcement/1|", body, KEY)
    return announcements.read_announcement(encode_sealed(sealed), KEY)


def take_heartbeat(data: bytes) -> object:
    table = HeartbeatTable(bytes(32))
    table.grant(WorkerId("w"), Epoch("e" * 32), URL("https://127.0.0.1:8100"), b"certificate")
    return table.take(data, Instant(1.0)), table.read_renewal(data, Instant(1.0))


def read_acknowledgement_datagram(data: bytes) -> object:
    return read_acknowledgement(data, GRANT)


def read_envelope(data: bytes) -> object:
    return unseal(base64.urlsafe_b64encode(data).rstrip(b"=").decode(), KEY)


def read_files(data: bytes) -> object:
    """What an operator puts beside a process's certificate: authorities, and what they revoked."""
    return Trust(dataclasses.replace(KEY.identity, authorities=data, revoked=data))


def encode_ticket(ticket: Ticket) -> bytes:
    return seal(msgspec.structs.replace(ticket), KEY).encode()  # signed anew, not as it was read


def read_vllm_params(data: bytes) -> object:
    """The `kv_transfer_params` of a request to vLLM, which has decoded the JSON."""
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return None  # vLLM's own server refuses it
    me = Identity(WorkerId("p"), Epoch("0" * 32), Role.BOTH, 1)
    return (
        repr(VllmTicketReader(me, KEY, clients_are_gateways=False).read(params))[:80]
        if isinstance(params, dict)
        else None
    )


def read_vllm_options(data: bytes) -> object:
    try:
        extra = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return read_options(extra) if isinstance(extra, dict) else None


# Handoff --------------------------------------------------------------------


def read_handoff_message(frame: bytes) -> messages.Message | None:
    message = messages.decode(frame)
    for field in ("blocks", "ranges"):
        packed = getattr(message, field, None)
        if packed is not None:
            try:
                (messages.unpack_blocks if field == "blocks" else unpack_ranges)(packed)
            except ProtocolError:
                continue
    if isinstance(message, messages.Hello):
        check_hello(message)
    return None if isinstance(message, messages.UnsupportedHello) else message


def check_hello(hello: messages.Hello) -> None:
    """What a worker computes of a peer's Hello before it trusts anything in it."""
    for view in hello.views:
        view.layout.fingerprint()
        assert view.layout.bytes_per_token > 0
        for region in (*view.regions, *hello.probe_buffers):
            try:
                check_arrays(region.arrays)
            except TransferError:
                continue


def read_notification(data: bytes) -> messages.Notification:
    notification = messages.decode_notification(data)
    with suppress(ProtocolError):
        notification.split()
    return notification


HANDOFF_VECTORS: Final = tuple(
    bytes.fromhex(text)
    for text in json.loads((VECTORS / "handoff/messages.json").read_text()).values()
)


# Streams and transports -----------------------------------------------------

MAX_BODY_BYTES: Final = 4096


def read_frames(stream: bytes) -> str:
    decoder, cuts = framing.FrameDecoder(MAX_BODY_BYTES), iter(stream)
    at = taken = 0
    while at < len(stream):
        step = (1 + next(cuts, 0)) ** 2 % 4096 + 1
        decoder.feed(stream[at : at + step])
        at += step
        while (body := decoder.take()) is not None:
            taken += framing.PREFIX_BYTES + len(body)
            assert len(body) <= MAX_BODY_BYTES
        assert 0 <= decoder.num_missing_bytes <= MAX_BODY_BYTES + framing.PREFIX_BYTES
    assert taken <= len(stream)
    return "x" * min(9, taken // 8)


def shake_hands(data: bytes) -> None:
    """No bytes pass for a proof: the first half is a hello or a proof, the second an answer."""
    half = len(data) // 2
    for side in (framing.ListenerHandshake(KEY, "tcp"), framing.DialerHandshake(KEY, "tcp")):
        try:
            side.reply(data[:half])
            side.reply(data[half:])
        except (ProtocolError, AuthenticationError):
            continue
        raise AssertionError("a peer without the key was taken for one with it")


FRAMES: Final = json.loads((VECTORS / "transfer/frames.json").read_text())


def frames_of(kind: str, *names: str) -> tuple[bytes, ...]:
    """The first frame's body of each vector."""
    found: list[bytes] = []
    for name in names:
        stream = bytes.fromhex(FRAMES[kind][name])
        end = 4 + int.from_bytes(stream[:4], "little")
        found.append(stream[4:end])
    return tuple(found)


ARRAY: Final = PageArray(4096, 512, 8)


def read_geometry(message: object) -> object:
    """The pages that a transport's message names, as its receiver reads them."""
    match message:
        case tcp.Data() | file_wire.PartFile():
            unpack = partial(unpack_target, message.dst_pages, message.spans, ARRAY)
        case tcp.Fetch():
            unpack = partial(unpack_geometry, message.src_pages, message.spans, ARRAY)
        case GrantOpened():
            unpack = partial(unpack_pages, message.pages)
        case tcp.Attached() | shared.Attached() | onesided.Attached() | file_wire.Attached():
            unpack = partial(check_arrays, message.arrays)
        case _:
            return message
    try:
        found = unpack()
    except (ProtocolError, TransferError):
        return message
    if not isinstance(found, np.ndarray) and found is not None:
        offsets, lengths = compute_runs(found, ARRAY)
        if len(offsets):
            assert offsets.min() >= ARRAY.offset_bytes
            assert lengths.min() > 0
            assert (
                offsets + lengths
            ).max() <= ARRAY.offset_bytes + ARRAY.page_bytes * ARRAY.num_pages
    return message


def transport_target(name: str, decode: Callable[[bytes], object], *frames: str) -> Target:
    seeds = frames_of(name.split("-")[1], *frames)
    return Target(
        name, lambda body: read_geometry(decode(body)), (ProtocolError,), seeds,
        encode=framing.encode,
    )  # fmt: skip


def read_endpoint(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return answers(
        (TransferError,),
        lambda: parse_endpoint("host", text),
        lambda: parse_endpoint("network", text),
    )


# Store and devices ----------------------------------------------------------

NAME: Final = EntryName(bytes(range(32)))


def read_record(data: bytes) -> None:
    header = read_header(NAME, data[:HEADER_BYTES], len(data))
    assert header is None or len(header.digest) == DIGEST_BYTES


class OneEntry:
    """A store that has one side entry, for `read_side_entry`."""

    def __init__(self, body: bytes) -> None:
        self._body, self.num_bytes = body, len(body)

    def find(self, names: Sequence[EntryName]) -> int:
        return len(names)

    def try_lease(self, _name: EntryName) -> OneEntry:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def try_read(self, target: memoryview) -> bool:
        target[:] = self._body
        return True


def read_side(decoder: msgspec.msgpack.Decoder[Any]) -> Callable[[bytes], object]:
    def read(body: bytes) -> str:
        entry = read_side_entry(cast("Any", OneEntry(body)), NAME, decoder)
        return answers((ProtocolError,), lambda: framing.decode(decoder, body)) + str(entry is None)

    return read


def wrap_table(body: bytes) -> bytes:
    magic = write_table(Table())[1][:8]
    return magic + xxh3_128_digest(body) + len(body).to_bytes(4, "little") + body


def read_device(data: bytes) -> str:
    """Two copies, of which the first is the input; what would be written then is read again."""
    table = read_table(data + bytes(max(0, COPY_BYTES - len(data))))
    if len(table.extents) < 8:
        at, packed = write_table(table)
        memory = bytes(at) + packed
        assert read_table(memory + bytes(max(0, COPY_BYTES - len(memory)))) == table
    return f"table of {'x' * min(9, len(table.extents))} {table.locks is None}"


TABLE: Final = Table(3, LockPlace("boot", 1, 2), (Extent(bytes(16), 1 << 21, 4096, 7, "baton"),))

# KV events ------------------------------------------------------------------

DOMAIN: Final = EventDomain("vllm/sha256")


PREFIX_NAMES: Final = PrefixNames(bytes(32))


def index_prefixes(events: Iterable[FeedEvent]) -> None:
    """What a router makes of them: the index is consistent, and forgets all."""
    prefixes = ModelPrefixes(PREFIX_NAMES)
    feed = prefixes.follow(WorkerId("w"))
    for event in events:
        feed.apply(event)
        prefixes.check_invariants()
    prefixes.forget(WorkerId("w"))
    prefixes.check_invariants()
    assert prefixes.num_blocks == prefixes.num_stored_blocks == 0


def read_journal(body: bytes) -> str:
    """What a Baton worker answers about its prefix cache."""
    page = decode_page(body, BATON_HASHES)
    index_prefixes(page.events)
    return f"{page.is_whole}, {len(page.events)}"


def read_events(data: bytes) -> str:
    """8 bytes are the number, the rest the payload; then what a gateway makes of the message."""
    frames = [b"", data[:8], data[8:]]
    message = decode_message(frames, DOMAIN)
    assert decode_replayed([b"", *frames], DOMAIN) == message
    index, sequencer = WorkerBlockIndex(DOMAIN), Sequencer(max_held=8, num_remembered=8)
    steps = list(
        chain(
            sequencer.connected(),
            sequencer.live(message),
            sequencer.replayed(message),
            sequencer.replay_ended(),
            sequencer.live(replace(message, seq=message.seq + 1)),
            sequencer.audit(),
        )
    )
    sequencer.check_invariants()
    index_prefixes(message.batch.events)
    for step in steps:
        if isinstance(step, Deliver):
            for event in step.batch.batch.events:
                index.apply(event)
    for event in message.batch.events:
        index.apply(event)
    index.check_invariants()
    return ", ".join(type(each).__name__ for each in (*steps, *message.batch.events[:4]))


EVENT_VECTORS: Final = tuple(
    bytes.fromhex(seq) + bytes.fromhex(payload)
    for _, seq, payload in json.loads((VECTORS / "events/vllm-0.32.json").read_text())["messages"]
)

# What a gateway reads of its workers, and others of a gateway ----------------

INFO: Final = {
    "worker": "w", "epoch": "0" * 32, "role": "decode", "served_model_name": "m",
    "fingerprint": "f", "max_context_tokens": 4096, "handoff_address": "127.0.0.1:1",
    "transports": ["shared", "tcp"], "version": "0.1", "model": "m", "layout": {"block_size": 16},
    "modes": ["push", "pull", "telepathy"],
}  # fmt: skip
VLLM_INFO: Final = INFO | {
    "protocol": "vllm", "rank_addresses": ["127.0.0.1:1", "127.0.0.1:2"], "engine": "vllm 0.32",
    "control_urls": ["http://127.0.0.1:3", "http://127.0.0.1:4"],
    "kv_events": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"},
}  # fmt: skip
LISTED: Final = WorkerAddress("http://127.0.0.1:8001", Role.DECODE)


def read_worker_info(body: bytes) -> None:
    info = read_info(body)
    why_not_used(info, LISTED)
    worker_view(Worker(LISTED, DEFAULT_HEALTH), info)
    if info.kv_events is not None:
        locate_events(info.kv_events, URL(LISTED.url))


def read_worker_answers(body: bytes) -> str:
    """Whatever a worker answers, one of these reads it; not one of them raises."""
    found = [
        repr(protocol_adapters.read_prefill_result(protocol, status, body))[:50]
        for protocol in ("baton", "vllm")
        for status in (200, 400, 409, 503, 500)
    ]
    str(read_error(body))
    load = read_health(body).load
    event = protocol_adapters.first_error(b"data: " + body + b"\n\n")
    protocol_adapters.client_answer(body)
    return f"{load is None} {event is None} {' '.join(found)}"


def read_traces_of_workers(body: bytes) -> str:
    """In place of the network: an answer to the gateway's question for a trace."""
    asked = cast("Any", FakeUpstream(body))
    found = asyncio.run(protocol_adapters._read_failures(asked, URL(LISTED.url), TICKET))
    return "failures" if found else "none"


class FakeUpstream:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def get(self, _url: URL, _timeout_s: float) -> tuple[int, bytes]:
        return 200, self._body


def read_gateway_pages(body: bytes) -> str:
    """`baton doctor` and `baton up` ask a gateway."""
    asked = cast("Any", FakeGateway(body))
    find_up(body)
    find_requests(body)
    find_model(body)
    return answers(
        (fleet.PageError, ProtocolError),
        lambda: fleet._read_metrics(asked),
        lambda: gateway_pages.decode_page(asked, "/", (200, body), gateway_pages.RequestIds),
        lambda: gateway_pages.decode_page(asked, "/", (500, body), gateway_pages.RequestIds),
    )


class FakeGateway:
    url = "http://127.0.0.1:1"

    def __init__(self, body: bytes) -> None:
        self._body = body

    def get(self, _path: str) -> tuple[int, bytes]:
        return 200, self._body


ANSWERS: Final = json_of(
    PrefillReply(first=FirstToken(msgspec.Raw(b'{"token_id":1}'), "data: {}\n\n")),
    {"error": {"message": "no", "type": "t", "param": None, "code": "stale_ticket"}},
    {"error": {"message": "no", "code": 503}},
    {
        "status": "ok",
        "load": {"num_waiting": 1, "num_blocks": 9, "num_free_blocks": 3, "block_size": 16},
    },
    {"choices": [], "kv_transfer_params": {"baton": {"status": "refused", "code": "stale_ticket"}}},
    {"choices": [], "kv_transfer_params": {"baton": {"status": "offered"}}},
)
METRICS: Final = (
    b"# HELP a b\n# TYPE baton_gateway_worker_up gauge\n"
    b'baton_gateway_worker_up{role="decode",url="http://127.0.0.1:1"} 1.0\n'
    b'# TYPE baton_gateway_fallbacks counter\nbaton_gateway_fallbacks_total{cause="x"} 2.0 1234\n'
)

# Configuration and the bench's files ----------------------------------------

CONFIG: Final = b"""
[gateway]
port = 8000
prefill = ["http://127.0.0.1:8001"]
[transfer]
transports = ["shared", "tcp"]
[transfer.options.tcp]
max_streams = 4
[cluster]
key_file = "~/key"
"""


def read_config_file(data: bytes) -> None:
    resolve.read_file(cast("Path", MemoryFile(data)))


def read_settings(data: bytes) -> str:
    """One line each of `--set`, and of the environment."""
    text = data.decode("utf-8", "replace")
    name, _, value = text.partition("=")
    return answers(
        (ConfigError, msgspec.ValidationError),
        lambda: resolve.read_assignments([text]),
        lambda: resolve.read_variables({f"BATON_{name.upper()}": value}),
        lambda: resolve.closed_keys()["gateway.port"].parse(value),
        lambda: resolve.closed_keys()["transfer.transports"].parse(value),
    )


def read_model(data: bytes) -> None:
    config, _ = read_config(data, "config.json")
    read_shape(config)


MODELS: Final = tuple(
    path.read_bytes() for path in sorted((REPOSITORY / "src/baton/models/configs").glob("*.json"))
)
LINKS: Final = {
    "schema": "baton-bench-link/1",
    "rows": [
        {"kind": "transport", "name": "tcp", "direction": "write",
         "workload": {"name": w, "shape": "scattered", "num_bytes": n},
         "figures": {"gb_per_s": {"median": 1.5}, "p50_us": 40.0}}
        for w, n in (("a", 1 << 20), ("b", 64))
    ],
}  # fmt: skip


SLICE: Final = {
    "metadata": {"name": "a", "resourceVersion": "7"},
    "addressType": "IPv6",
    "ports": [{"name": "http", "port": 8101, "appProtocol": "https"}, {"name": None, "port": None}],
    "endpoints": [
        {
            "addresses": ["2001:db8::1"],
            "conditions": {"ready": False, "serving": True, "terminating": True},
            "targetRef": {"kind": "Pod", "uid": "u"},
        }
    ],
}


MEMBERS: Final = {
    "version": 1,
    "workers": [
        {"url": "https://10.0.0.2:8101", "role": "prefill"},
        {"url": "https://[2001:db8::1]:8101", "role": "both", "draining": True},
    ],
}


def follow_service(data: bytes) -> None:
    workers = ServiceWorkers(Role.DECODE, None)
    try:
        workers.replace(decode_slices(data).items or ())
    except ProtocolError:
        change = decode_event(data)
        if isinstance(change, SlicePut):
            workers.put(change.found)
    for worker in workers.workers:
        assert Worker(worker, DEFAULT_HEALTH).url.host


def read_members(data: bytes) -> None:
    members = MemberSet(("file:/a",))
    members.update("file:/a", read_addresses(data))
    for url in members.listings:
        assert Worker(WorkerAddress(str(url), Role.BOTH), DEFAULT_HEALTH).url == url


def read_stream(data: bytes) -> str:
    parser, answer = EventParser(), Answer([])
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        for event in parser.feed(part):
            answer.push(event, 1.0)
            read_stream_error(event)
    assert answer.tokens is not None
    return str(answer.end())


STREAM: Final = (
    b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\ndata: [DONE]\n\n',
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}],"usage":{}}\r\n\r\n',
    b'data: {"error":{"message":"no","code":500}}\n\n',
)


def read_traces(data: bytes) -> str:
    readers = MooncakeReader(), AzureReader(), BatchReader()
    lines = data.decode("utf-8", "surrogateescape").splitlines()[:8]
    return answers(
        (BrokenLineError,),
        *(
            lambda reader=reader, number=number, line=line: reader.read(number, line)
            for number, line in enumerate(lines)
            for reader in readers
        ),
    )


TRACES: Final = (
    b'{"timestamp":1,"input_length":1030,"output_length":5,"hash_ids":[1,2,3]}\n',
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
    b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"a","max_tokens":5}}',
)


def read_announced(data: bytes) -> None:
    map_announced(decode_announcement(data), np.zeros((8, 64), np.uint8))


_commands: Final = msgspec.msgpack.Decoder(backend.Command)
_replies: Final = msgspec.msgpack.Decoder(backend.Reply)
NO_ERROR: Final = ()
PROTOCOL: Final = (ProtocolError,)
ANNOUNCEMENT: Final = announcements.Announcement(
    worker=WorkerId("w"),
    epoch=Epoch("e" * 32),
    url="https://127.0.0.1:8100",
    role=Role.BOTH,
    lease_s=6.0,
    sequence=3,
)
GRANT: Final = HeartbeatGrant.derive(bytes(32), WorkerId("w"), Epoch("e" * 32))
KNOWN: Final = announcements.Known(bytes(8), bytes(8), 3)
RELAYED: Final = announcements.Relayed(b"sealed", 0.5)
CONFIG_ERROR: Final = (ConfigError,)

TARGETS: Final = {
    target.name: target
    for target in (
        Target("http-gateway", read_gateway_body, (InvalidRequestError,), BODIES + CHATS, "json",
               encode=lambda body: body, weight=2),
        Target("http-tenant", partial(read_gateway_body, tenant="acme"), (InvalidRequestError,),
               BODIES, "json"),
        Target("http-completion", lambda body: parse_completion(body, MAX_CONTEXT_TOKENS),
               (InvalidRequestError,), BODIES, "json"),
        Target("http-chat", parse_chat, (InvalidRequestError,), CHATS, "json"),
        Target("http-control", read_control_body, NO_ERROR,
               (*json_of({"reason": "gone"}, SampledToken(7, -0.5), NextTokens(3, [17], True)),
                b"0" * 32), "json"),
        Target("http-headers", read_headers, NO_ERROR, (b"req-1", b"00-abc-def-01"), "text"),
        Target(
            "target-headers", read_target_headers, (InvalidRequestError,),
            (b"ttft-ms=1500", b"tpot-ms=7.5e1", b"priority=low"), "text",
        ),
        Target("client-keys", of_file(read_keys), CONFIG_ERROR,
               json_of(ClientKeyFile((CLIENT_KEY,))), "json"),
        Target("client-authorization", authenticate, (UnauthorizedError,),
               (b"Bearer " + CLIENT_TEXT.encode(), b"Bearer x"), "text"),
        Target("ticket", lambda data: unseal(data.decode("latin-1"), KEY), (TicketError,),
               (encode_ticket(TICKET),), "text", encode=encode_ticket),
        Target("ticket-signed", lambda body: unseal(sign(body).decode(), KEY), (TicketError,),
               seeds_of(TICKET), encode=msgspec.msgpack.encode),
        Target("ticket-envelope", read_envelope, (TicketError,),
               (msgspec.msgpack.encode([b"body", KEY.signer.certificate, bytes(64)]),)),
        Target("announcement", lambda data: announcements.read_announcement(data, KEY),
               (AnnouncementError,), (announcements.seal_announcement(ANNOUNCEMENT, KEY),)),
        Target("announcement-signed", read_signed_announcement, (AnnouncementError,),
               seeds_of(ANNOUNCEMENT), encode=msgspec.msgpack.encode),
        Target("heartbeat", take_heartbeat, NO_ERROR,
               (make_heartbeat(GRANT, 7), make_renewal(GRANT, bytes(64)) or b"")),
        Target("acknowledgement", read_acknowledgement_datagram, NO_ERROR,
               (make_acknowledgement(GRANT, Acknowledgement(7, asks_for_post=False)),)),
        Target("announcement-reply", announcements.read_reply, PROTOCOL,
               seeds_of(announcements.AnnouncementReply(result="waiting", wait_s=1.5))),
        Target("announcement-exchange", announcements.read_exchange, PROTOCOL,
               seeds_of(announcements.Exchange(known=(KNOWN,), relayed=(RELAYED,)))),
        Target("announcement-exchange-reply", announcements.read_exchange_reply, PROTOCOL,
               seeds_of(announcements.ExchangeReply(relayed=(RELAYED,), wanted=(bytes(8),)))),
        Target("certificate", KEY.find_peer, (AuthenticationError,), (KEY.signer.certificate,)),
        Target("certificate-files", read_files, CONFIG_ERROR,
               (KEY.identity.authorities + AUTHORITY.revoke((1, 2), NOW),), "text"),
        Target("ticket-use", use_tickets, PROTOCOL,
               (msgspec.msgpack.encode([
                   msgspec.structs.replace(TICKET.issue, number=number, at=float(number))
                   for number in (1, 2, 3, 64, 66, 1000)]),)),
        Target("vllm-params", read_vllm_params, NO_ERROR,
               json_of({"baton_ticket": encode_ticket(TICKET).decode(), "do_remote_decode": True},
                       {"baton_info": True}), "json"),
        Target("vllm-options", read_vllm_options, CONFIG_ERROR,
               json_of({"handoff_host": "127.0.0.1", "verify_share": 0.5, "transports": ["tcp"],
                        "store": {"tiers": ["file"]}, "staging_bytes": 5}), "json"),
        Target("vllm-identity", read_identity, (EngineError,),
               json_of({"kv_transfer_params": {"baton_info": {
                   "worker": "w", "epoch": "e", "handoff_address": "a"}}}), "json"),
        Target("handoff-message", read_handoff_message, PROTOCOL, HANDOFF_VECTORS,
               encode=messages.encode, weight=4),
        Target("handoff-notification", read_notification, PROTOCOL,
               tuple(map(messages.encode, (
                   messages.Notification(1, 0, 16, bytes(16)),
                   messages.Notification(0, 16, 40, bytes(96), 3)))),
               encode=messages.encode),
        Target("handoff-probe", messages.decode_probe_notification, PROTOCOL,
               (messages.encode(messages.ProbeNotification(4, bytes(16))),),
               encode=messages.encode),
        Target("net-frames", read_frames, PROTOCOL,
               (framing.encode_frame(b"abc") * 3, framing.encode_frame(bytes(4096))), "bytes"),
        Target("net-handshake", shake_hands, NO_ERROR,
               (framing.DialerHandshake(KEY, "tcp").opening()[4:] + bytes(32),
                framing.MAGIC + bytes(48) + bytes(54)), "bytes"),
        transport_target("transfer-tcp-attach", tcp.decode_attach, "attach"),
        transport_target("transfer-tcp-dialer", tcp.decode_from_dialer, "data", "data_not_last",
                         "data_striped", "fetch"),
        transport_target("transfer-tcp-listener", tcp.decode_from_listener, "attached",
                         "not_attached", "write_landed", "write_refused", "fetch_served"),
        transport_target("transfer-shared-attach", shared.decode_attach, "attach"),
        transport_target("transfer-shared-writer", shared.decode_from_writer,
                         "write_notification", "write_notification_of_a_layer", "query_grant",
                         "grant_closed", "memory_released"),
        transport_target("transfer-shared-first", shared.decode_first_from_receiver, "attached",
                         "attached_extent", "not_attached"),
        transport_target("transfer-shared-receiver", shared.decode_from_receiver, "grant_opened",
                         "close_grant", "grant_not_open"),
        transport_target("transfer-file-attach", file_wire.decode_attach, "attach"),
        transport_target("transfer-file-writer", file_wire.decode_from_writer, "part_file",
                         "part_file_not_last", "write_abandoned"),
        transport_target("transfer-file-receiver", file_wire.decode_from_receiver, "attached",
                         "not_attached", "part_landed", "part_refused"),
        transport_target("transfer-onesided-attach", onesided.decode_attach, "attach"),
        transport_target("transfer-onesided-peer", onesided.decode_from_peer,
                         "write_notification", "query_grant", "grant_closed", "transfers_active",
                         "transfers_idle", "memory_released"),
        transport_target("transfer-onesided-first", onesided.decode_first_from_owner, "attached",
                         "not_attached"),
        transport_target("transfer-onesided-owner", onesided.decode_from_owner, "grant_opened",
                         "close_grant", "grant_not_open"),
        Target("transfer-cuda-metadata",
               lambda body: decode_metadata(body, (ARRAY, ARRAY)), (TransferError, ProtocolError),
               seeds_of(CudaIpcMetadata((bytes(64),), (ArrayLocation(0, 0), ArrayLocation(0, 64)))),
               encode=framing.encode),
        Target("transfer-mooncake-metadata", partial(framing.decode, mooncake_metadata), PROTOCOL,
               seeds_of(MooncakeMetadata(80, 4096)), encode=framing.encode),
        Target("transfer-nixl-metadata", partial(framing.decode, nixl_metadata), PROTOCOL,
               seeds_of(NixlMetadata(b"agent", 4096)), encode=framing.encode),
        Target("transfer-endpoint", read_endpoint, NO_ERROR,
               (b"127.0.0.1:80", b"[::1]:80", b"baton-" + b"0" * 32), "text"),
        Target("store-record", read_record, NO_ERROR,
               (make_header(bytes(32), NAME, memoryview(b"abc")) + b"abc",), "bytes"),
        Target("store-marker", read_side(_marker_decoder), NO_ERROR,
               seeds_of(CompletionMarker(bytes(32), 5, SampledToken(7), "why"))),
        Target("store-heartbeat", read_side(_heartbeat_decoder), NO_ERROR,
               seeds_of(HeartbeatEntry(1, (TicketId(bytes(16)),)))),
        Target("store-peer-request", partial(framing.decode, request_decoder), PROTOCOL,
               seeds_of(FindEntries(NAME * 2), UseEntry(NAME, 1000), PutEntry(NAME, 1000),
                        ListEntries(NAME), ReportStatus()), encode=framing.encode),
        Target("store-peer-answer", partial(framing.decode, answer_decoder), PROTOCOL,
               seeds_of(Found(b"\1\0"), Value(1000), Stored(is_new=True), NoRoom("why"),
                        Listing([ListedValue(NAME, 1000, 0.5)]),
                        Status("0.1.0", 1, 2, takes_entries=True)), encode=framing.encode),
        Target("device-table", read_device, NO_ERROR,
               (write_table(TABLE)[1], write_table(Table())[1]), "bytes"),
        Target("device-table-signed", lambda body: read_device(wrap_table(body)), NO_ERROR,
               seeds_of(TABLE, Table())),
        Target("kv-events", read_events, PROTOCOL, EVENT_VECTORS, "bytes"),
        Target("kv-events-payload", lambda body: read_events(bytes(8) + body), PROTOCOL,
               tuple(seed[8:] for seed in EVENT_VECTORS), weight=2),
        Target("kv-journal", read_journal, PROTOCOL, (
            encode_page(JournalPage(7, is_whole=True, events=(
                BlockStored(BATON_HASHES, (b"a" * 32, b"b" * 32), None, pack_ids((1, 2, 3, 4)), 2,
                            "GPU", 0),
                BlocksExpected(b"b" * 32, pack_ids((5, 6)), 2),
                BlockRemoved(BATON_HASHES, (b"b" * 32,), "GPU", 0)))),
            encode_page(JournalPage(9, is_whole=True, events=(
                TiersListed(("0" * 32,)),
                EntriesStored("0" * 32, bytes(16), 64, pack_names((1, 2))),
                EntriesRemoved("0" * 32, bytes(16), 64, pack_names((2,)))))),
            encode_page(JournalPage(0, is_whole=False, events=()))), "bytes"),
        Target("worker-info", read_worker_info, (ProtocolError, ConfigError),
               json_of(INFO, VLLM_INFO), "json"),
        Target("endpoint-slices", follow_service, (ProtocolError,),
               json_of({"metadata": {"resourceVersion": "7", "continue": ""}, "items": [SLICE]},
                       {"type": "ADDED", "object": SLICE}, {"type": "DELETED", "object": SLICE},
                       {"type": "ERROR", "object": {"code": 410, "message": "too old"}}), "json"),
        Target("members-file", read_members, (ProtocolError, ConfigError),
               json_of(MEMBERS), "json"),
        Target("worker-answers", read_worker_answers, NO_ERROR, ANSWERS, "json"),
        Target("worker-streams", go_on_with_stream, NO_ERROR, STREAMS, "bytes"),
        Target("worker-traces", read_traces_of_workers, NO_ERROR,
               json_of(RequestSpan(request_id="req-1", worker="w", epoch="e", role="decode",
                                   ticket=TICKET.id.hex(), fallbacks=["no KV"])), "json"),
        Target("worker-models", _read_models, PROTOCOL,
               json_of({"data": [{"id": "m"}, {"id": "a", "parent": "m"}]}), "json"),
        Target("process-status", read_status, PROTOCOL,
               json_of({"event": "loading", "url": "u", "what": "w", "phase": "p"},
                       {"event": "ready", "url": "u"}, {"event": "draining", "timeout_s": 1.0}),
               "json"),
        Target("control-request", decode_request, PROTOCOL,
               json_of({"verb": "scale", "size": {"decode": 4}}, {"verb": "drain", "worker": "w"},
                       {"verb": "status"}), "json"),
        Target("control-answer", decode_answer, PROTOCOL,
               json_of({"kind": "progress", "text": "t"}, {"kind": "refused", "message": "m"},
                       {"kind": "done"}, {"kind": "status", "status": {
                           "fleet": "f", "backend": "local", "version": "1", "members": [
                               {"name": "w", "role": "decode", "state": "ready", "host": "h"}]}}),
               "json"),
        Target("gateway-pages", read_gateway_pages, NO_ERROR,
               (METRICS, *json_of({"requests": [{"id": "r"}]}, {"data": [{"id": "m"}]})), "json"),
        Target("config-file", read_config_file, CONFIG_ERROR, (CONFIG,), "text"),
        Target("config-settings", read_settings, NO_ERROR,
               (b"gateway.port=8000", b"transfer.options.tcp={max_streams = 4}",
                b"transfer.transports=tcp,shared"), "text"),
        Target("model-config", read_model, CONFIG_ERROR, MODELS, "json"),
        Target("bench-links", of_file(read_links), CONFIG_ERROR, json_of(LINKS), "json"),
        Target("bench-report", of_file(read_report), CONFIG_ERROR,
               json_of({"schema": "baton-bench-serve/1", "runs": []}), "json"),
        Target("bench-stream", read_stream, PROTOCOL, STREAM, "text"),
        Target("bench-traces", read_traces, NO_ERROR, TRACES, "text"),
        Target("rig-announcement", read_announced, PROTOCOL,
               seeds_of(PageAnnouncement(0, bytes(8), 0, 1, 64))),
        Target("rig-command", partial(framing.decode, _commands), PROTOCOL,
               seeds_of(backend.Build("transport", "tcp", {"a": 1}, "owner", 64),
                        backend.Connect(b"abc"), backend.Call("x", b"y"), backend.Serve())),
        Target("rig-reply", partial(framing.decode, _replies), PROTOCOL,
               seeds_of(backend.Served(0.5), backend.Measured((0.1, 0.2), 3, 0.1),
                        backend.Failed("no"), backend.Digest("abc"))),
        Target("handoff-peer", run_episode, NO_ERROR, (b"0", b"1"), "bytes", weight=0.02, chunk=50,
               max_s=20),
        Target("transfer-peer", run_transfer, NO_ERROR, (b"0", b"1"), "bytes", weight=0.02,
               chunk=50, max_s=20),
    )
}  # fmt: skip
