"""One HTTP request that Envoy forwards: which worker it goes to, and what that worker gets."""

from __future__ import annotations

import ipaddress
from contextlib import ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.gateway.app import COMPLETION_PATHS
from baton.gateway.errors import NoWorkerError, PathNotFoundError
from baton.gateway.health_monitor import is_own_fault
from baton.gateway.metrics import NO_MODE, NO_MODEL
from baton.gateway.placing import find_base, find_prompt, find_serving
from baton.gateway.request import (
    CompletionBody,
    check_content_type,
    estimate_prompt_tokens,
    parse_body,
    request_id_from,
)
from baton.gateway.request_context import RequestContext, Services
from baton.gateway.targets import read_targets
from baton.ids import Epoch
from baton.net.host_names import name_of
from baton.router.failover import EVERY_MODE
from baton.router.fleet import Fleet, ModelWorkers
from baton.router.placement import Placement, PlacementRequest, Unplaceable
from baton.telemetry.trace import RequestSpan

if TYPE_CHECKING:
    from yarl import URL

    from baton.gateway.workers import Worker
    from baton.router.prefixes import PromptMatch

Headers = tuple[tuple[bytes, bytes], ...]
_POST: Final = b"POST"
LOOKUP_TIMEOUT_S: Final = 5.0
"""Of a worker's host name: Envoy waits for the answer."""


class PickedRequest:
    """Owner: the event loop's thread. `close` must follow, whatever happens.

    Raises:
        BatonError: the client may not ask this, as by `answer_for`.
    """

    def __init__(self, services: Services, method: bytes, path: str, headers: Headers) -> None:
        if method != _POST or path not in COMPLETION_PATHS:
            raise PathNotFoundError(f"{path[:200]} is not forwarded; POST to /v1/…completions is")
        self._services = services
        client = services.clients.authenticate(headers)
        check_content_type(headers)
        now, request_id = services.clock.now(), request_id_from(headers)
        self._context = RequestContext(
            id=request_id,
            path=path,
            received_at=now,
            deadline=Instant(now + services.options.request_timeout_s),
            forwarded_headers=b"",
            trace=RequestSpan(
                request_id=request_id, worker="picker", epoch=Epoch(""), role="gateway"
            ),
            metrics=services.metrics.of(NO_MODEL, NO_MODE),
            client=client,
            targets=read_targets(headers),
        )
        self._placement: Placement | None = None
        self._is_stream, self._num_parts = False, 0
        self._held = ExitStack()
        self._held.enter_context(services.clients.admit(client))
        self._held.callback(self._account)

    async def place(self, data: bytes, subset: frozenset[str] | None) -> tuple[str, bytes]:
        """Choose a worker: its address, `ip:port`, and the body that it is to get.

        `subset`: addresses of which one must be chosen; None: of any worker.

        Raises:
            BatonError: the request is refused, or no worker is there for it.
        """
        services, context = self._services, self._context
        body = find_base(services.workers, parse_body(data, context.client.tenant, context.path))
        context.model, context.adapter = body.model, body.adapter
        context.model_targets = services.options.targets_of(body.model)
        match = await find_prompt(services, body)
        num_tokens = estimate_prompt_tokens(body) if match is None else match.num_tokens
        full = await services.admission.enter(context, body, num_tokens, match)
        if context.waited_s and match is not None and services.prefixes is not None:
            match = services.prefixes.find_again(body, match)
        self._held.callback(services.admission.leave, body.model)
        request = PlacementRequest(
            body.model,
            num_prompt_tokens=num_tokens,
            at=services.clock.now(),
            cached={} if match is None else match.cached,
            stored={} if match is None else match.stored,
            failed_modes=EVERY_MODE,  # Envoy asks one worker
            full=full,
            ttft_s=services.admission.ttft_left_s(context),
            tpot_s=services.admission.tpot_s(context),
            itl_s=services.admission.itl_s(context),
            is_tokenized=match is not None,
        )
        placement = self._place(body, request, subset)
        context.begin_attempt(placement, services.metrics.of(context.model, placement.mode))
        self._begin(placement, num_tokens, match)
        if match is not None and match.may_have_more(placement.decode.id):
            body = body.for_report()
        return await _address_of(services.workers.of(placement.decode).url), body.encode()

    def note_head(self, status: int, *, is_stream: bool) -> None:
        """The worker has begun to answer: with a stream, or with an answer in one piece."""
        self._context.status, self._is_stream = status, is_stream
        worker = self._worker
        if worker is None:
            return
        if is_own_fault(status):
            self._services.health_monitor.note_failed(worker, f"it answered {status}")
        elif status < HTTPStatus.BAD_REQUEST:
            self._services.health_monitor.note_answered(worker)

    def note_part(self) -> None:
        """A part of the answer has come; of one in one piece that shows when it ended, no more."""
        if not self._is_stream:
            return
        self._num_parts += 1
        if self._context.running is not None:
            self._context.running.first_token(self._services.clock.now())

    def close(self) -> None:
        """The request is over, or its client has left."""
        self._held.close()

    def _account(self) -> None:
        context, now = self._context, self._services.clock.now()
        context.metrics.count(context.status or HTTPStatus.SERVICE_UNAVAILABLE)
        context.metrics.duration.observe(now - context.received_at)

    def _begin(self, placement: Placement, num_tokens: int, match: PromptMatch | None) -> None:
        """Count a placement in, until `close`."""
        services, context, now = self._services, self._context, self._services.clock.now()
        num_cached = 0 if match is None else match.cached.get(placement.decode.id, 0)
        if match is not None and services.prefixes is not None:
            services.prefixes.expect(context.model, match, placement)
        running = context.running = services.load.begin(
            placement,
            num_tokens - num_cached - placement.num_stored_tokens,
            now,
            num_cached=num_cached,
            waited_s=context.waited_s,
        )
        itl_s = services.admission.itl_s(context)
        if itl_s is not None:
            running.limit_gaps(itl_s)
        services.health_monitor.begin(placement)
        self._placement = placement
        self._held.callback(services.health_monitor.end, placement)
        self._held.callback(lambda: running.end(services.clock.now(), self._num_parts))

    @property
    def _worker(self) -> Worker | None:
        placement = self._placement
        return None if placement is None else self._services.workers.with_id(placement.decode.id)

    def _place(
        self, body: CompletionBody, request: PlacementRequest, subset: frozenset[str] | None
    ) -> Placement:
        services, model = self._services, body.model
        if model not in services.workers.fleet.models:
            raise NoWorkerError(f"the model {model!r} is not served any more")
        num_known = request.num_prompt_tokens if request.is_tokenized else 0
        fleet = find_serving(services.workers.fleet, body, num_known)
        decodes = [
            view
            for view in fleet.models[model].decodes
            if subset is None or services.workers.of(view).url.authority in subset
        ]
        # A part of the fleet, for which no labour is divided: nothing is handed over here.
        alone = Fleet({model: ModelWorkers.of(decodes, is_part=True)})
        placement = services.placement.place(alone, request, services.load)
        if isinstance(placement, Unplaceable):
            raise NoWorkerError(placement.reason)
        return placement


async def _address_of(url: URL) -> str:
    """`ip:port`, as Envoy wants it."""
    host, port = url.host or "", url.port
    name = name_of(host)
    try:
        found = host if name is None else (await name.look_up(LOOKUP_TIMEOUT_S))[0]
    except OSError as exc:
        raise NoWorkerError(f"{host} has no address: {exc.strerror or exc}") from exc
    address = ipaddress.ip_address(found)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"  # noqa: PLR2004
