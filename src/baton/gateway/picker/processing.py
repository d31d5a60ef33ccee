"""One gRPC stream of Envoy's external processing: the messages of one HTTP request.

    request headers ─► request body … end ─► place ─► headers with the address, then the body
                       (its last part, or trailers)
    response headers, body ─► as they are; what they show of the worker is noted
    any error ─► ImmediateResponse: 4xx or 503; 429 where there is no room

Where Envoy sends the body in one piece (`BUFFERED`), it waits for an answer to the headers first:
the address then goes with the body. Otherwise (`FULL_DUPLEX_STREAMED`, which the protocol of the
Inference Extension asks for) nothing is answered before the body's end.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf import struct_pb2

from baton.errors import BatonError, InvalidRequestError, OverloadedError
from baton.gateway.errors import ErrorAnswer, answer_for
from baton.gateway.picker.picked_request import PickedRequest
from baton.gateway.response_forwarder import is_event_stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

    from baton.gateway.asgi import BodyBudget, BodyLimit
    from baton.gateway.request_context import Services

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE, NAMESPACE = "envoy.lb.subset_hint", "envoy.lb"
OWN_HEADERS: Final = b"x-baton-"
"""Of gateways alone: workers believe them."""
MAX_PART_BYTES: Final = 60_000
"""Of a body that is streamed back: Envoy takes at most 64 KiB at once."""
TOO_MANY_REQUESTS: Final = 429
BUFFERED: Final = processing_mode_pb2.ProcessingMode.BUFFERED
FULL_DUPLEX: Final = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED

log = logging.getLogger(__name__)


class Processing:
    """Of one HTTP request; `close` must follow. Owner: the event loop's thread."""

    def __init__(self, services: Services, bodies: BodyBudget, limit: BodyLimit) -> None:
        self._services, self._limit = services, limit
        self._held = ExitStack()
        self._received = self._held.enter_context(ExitStack())
        self._body = self._received.enter_context(bodies.hold())
        self._request: PickedRequest | None = None
        self._parts: list[bytes] = []
        self._removed: list[str] = []
        self._subset: frozenset[str] | None = None
        self._is_buffered = self._is_placed = False
        self._response_mode = FULL_DUPLEX

    async def run(
        self, messages: AsyncIterable[ext_proc.ProcessingRequest]
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        """Answer Envoy's messages until the request is over."""
        try:
            async for message in messages:
                for answer in await self._answer(message):
                    yield answer
        except BatonError as exc:
            yield _refuse(exc)
        except Exception as exc:
            log.exception("a request could not be placed")
            yield _refuse(exc)

    def close(self) -> None:
        """The HTTP request is over, or its client has left."""
        self._held.close()

    async def _answer(
        self, message: ext_proc.ProcessingRequest
    ) -> Iterable[ext_proc.ProcessingResponse]:
        match message.WhichOneof("request"):
            case "request_headers":
                return self._begin(message)
            case "request_body":
                return await self._take(message.request_body)
            case "response_headers":
                return self._note_response(message.response_headers)
            case "response_body":
                return self._pass_response(message.response_body)
            case "request_trailers":
                return await self._take_trailers()
            case "response_trailers":
                return (ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse()),)
            case _:
                return ()

    def _begin(self, message: ext_proc.ProcessingRequest) -> Iterable[ext_proc.ProcessingResponse]:
        """The head of the request."""
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._is_buffered = config.request_body_mode == BUFFERED
            self._response_mode = config.response_body_mode
        headers = tuple(_read_headers(message.request_headers.headers))
        self._subset = _read_subset(message.metadata_context)
        of_name = dict(headers)
        path = of_name.get(b":path", b"").partition(b"?")[0].decode("latin-1")
        method = of_name.get(b":method", b"")
        self._request = PickedRequest(self._services, method, path, headers)
        self._held.callback(self._request.close)
        if message.request_headers.end_of_stream:
            raise InvalidRequestError("the body is not a JSON object: there is none")
        self._removed = [n.decode("latin-1") for n, _ in headers if n.startswith(OWN_HEADERS)]
        if self._services.options.client_keys_file:
            self._removed.append("authorization")  # the client's key is for gateways
        if not self._is_buffered:
            return ()
        return (ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse()),)

    async def _take(self, body: ext_proc.HttpBody) -> Iterable[ext_proc.ProcessingResponse]:
        """A part of the body; the request is placed at its end."""
        if self._is_placed:
            raise BatonError("a part of a body came after its end")
        self._body.take(len(body.body))
        self._parts.append(body.body)
        if self._limit.is_passed(self._body.num_bytes):
            raise self._limit.explain()
        if self._is_buffered or body.end_of_stream:
            return await self._place(is_end=True)
        return ()

    async def _take_trailers(self) -> Iterable[ext_proc.ProcessingResponse]:
        """They end a body that is streamed: none of its parts is marked as the last."""
        answer = ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())
        placed = () if self._is_placed else await self._place(is_end=False)
        return (*placed, answer)

    async def _place(self, *, is_end: bool) -> Iterable[ext_proc.ProcessingResponse]:
        """The body is here. `is_end`: no trailers follow."""
        if self._request is None:
            raise BatonError("a body came before its headers")
        self._is_placed = True
        data = b"".join(self._parts)
        self._parts.clear()
        address, data = await self._request.place(data, self._subset)
        self._received.close()  # Envoy has the body from here on, however long the answer takes
        common = ext_proc.CommonResponse(
            header_mutation=self._mutate(address, len(data)), clear_route_cache=True
        )
        metadata = _metadata_of(address)
        if self._is_buffered:
            common.body_mutation.body = data
            answer = ext_proc.BodyResponse(response=common)
            return (ext_proc.ProcessingResponse(request_body=answer, dynamic_metadata=metadata),)
        head = ext_proc.HeadersResponse(response=common)
        return (
            ext_proc.ProcessingResponse(request_headers=head, dynamic_metadata=metadata),
            *_stream(data, is_end=is_end),
        )

    def _mutate(self, address: str, num_bytes: int) -> ext_proc.HeaderMutation:
        values = {DESTINATION: address, "content-length": str(num_bytes)}
        return ext_proc.HeaderMutation(
            set_headers=[
                base_pb2.HeaderValueOption(
                    header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
                    append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
                )
                for key, value in values.items()
            ],
            remove_headers=self._removed,
        )

    def _note_response(self, head: ext_proc.HttpHeaders) -> Iterable[ext_proc.ProcessingResponse]:
        headers = dict(_read_headers(head.headers))
        status, kind = headers.get(b":status", b""), headers.get(b"content-type", b"")
        if self._request is not None and status.isdigit():
            self._request.note_head(int(status), is_stream=is_event_stream(kind))
        return (ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse()),)

    def _pass_response(self, body: ext_proc.HttpBody) -> Iterable[ext_proc.ProcessingResponse]:
        if self._request is not None and body.body:
            self._request.note_part()
        answer = ext_proc.BodyResponse()
        if self._response_mode == FULL_DUPLEX:
            answer.response.body_mutation.streamed_response.body = body.body
            answer.response.body_mutation.streamed_response.end_of_stream = body.end_of_stream
        return (ext_proc.ProcessingResponse(response_body=answer),)


def _stream(data: bytes, *, is_end: bool) -> Iterator[ext_proc.ProcessingResponse]:
    for start in range(0, max(1, len(data)), MAX_PART_BYTES):
        answer = ext_proc.BodyResponse()
        part = answer.response.body_mutation.streamed_response
        part.body = data[start : start + MAX_PART_BYTES]
        part.end_of_stream = is_end and start + MAX_PART_BYTES >= len(data)
        yield ext_proc.ProcessingResponse(request_body=answer)


def _read_headers(headers: base_pb2.HeaderMap) -> Iterator[tuple[bytes, bytes]]:
    """Names in lower case. Envoy puts values into `raw_value`; older ones into `value`."""
    for header in headers.headers:
        yield (
            header.key.lower().encode("latin-1", "replace"),
            header.raw_value or header.value.encode(),
        )


def _read_subset(metadata: base_pb2.Metadata) -> frozenset[str] | None:
    """The addresses of which one must be chosen; None: any may be."""
    hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    listed = value.list_value.values if value.HasField("list_value") else [value]
    texts = (word.strip() for each in listed for word in each.string_value.split(","))
    return frozenset(filter(None, texts))


def _metadata_of(address: str) -> struct_pb2.Struct:
    metadata = struct_pb2.Struct()
    metadata.get_or_create_struct(NAMESPACE)[DESTINATION] = address
    return metadata


def _refuse(error: Exception) -> ext_proc.ProcessingResponse:
    answer = answer_for(error)
    if isinstance(error, OverloadedError):  # the protocol's status for what is dropped
        answer = ErrorAnswer(TOO_MANY_REQUESTS, answer.body, answer.headers)
    response = ext_proc.ImmediateResponse(body=answer.body, details=type(error).__name__)
    response.status.code = answer.status
    for key, value in ((b"content-type", b"application/json"), *answer.headers):
        header = base_pb2.HeaderValue(key=key.decode("latin-1"), raw_value=value)
        response.headers.set_headers.append(base_pb2.HeaderValueOption(header=header))
    return ext_proc.ProcessingResponse(immediate_response=response)
