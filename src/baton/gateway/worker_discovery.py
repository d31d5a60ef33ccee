"""Asks a worker who it is, and how loaded.

A Baton worker is asked who it is at once, a vLLM server in three steps:

    /baton/v1/info ──200──► a Baton worker
          │404
    /v1/models (its model's name) ─► the discovery probe: a completion of one token, which Baton's
          connector answers with `baton_info` ─► its control server, asked for the same from then
          on, and /v1/models for LoRA adapters, which may be loaded at any time

The probe costs the engine a step, so it is sent only to learn something new: who a server is, after
it came up or when its control server does not report it. That server only confirms: another
process may have taken its port.
"""

from __future__ import annotations

import json
import logging
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from yarl import URL

from baton.clock import Clock, Instant, read_clock_domain
from baton.errors import UNDECODABLE, BatonError, ProtocolError
from baton.gateway.errors import UnusableWorkerError, UpstreamError
from baton.gateway.upstream import Upstream, read_error
from baton.gateway.worker_info import KV_ROLES, read_health, read_info, why_not_asked
from baton.protocol.worker_http import HEALTH_PATH, INFO_PATH, ClockReading, Health, WorkerInfo

if TYPE_CHECKING:
    from baton.gateway.workers import Worker

PROBE_TIMEOUT_S: Final = 30.0
"""For one token: the first request of a vLLM server takes some seconds, and it may have others."""

COMPLETIONS: Final = "/v1/completions"
MAX_ADAPTERS: Final = 4096
"""Of one worker."""

log = logging.getLogger(__name__)


class IncarnationCheck(Enum):
    """What a vLLM server's control server reports about the known incarnation."""

    SAME = "same"
    ANOTHER = "another"
    UNKNOWN = "unknown"


class WorkerDiscovery:
    """Asks one worker who it is. Owner: the event loop's thread."""

    def __init__(self, worker: Worker, upstream: Upstream, timeout_s: float) -> None:
        self._worker, self._upstream, self._timeout_s = worker, upstream, timeout_s
        self._known_info: WorkerInfo | None = None
        self.adapters: frozenset[str] = frozenset()
        """Names of the LoRA adapters that it served when it was asked last."""
        self._unusable: str | None = None

    def forget_rejection(self) -> None:
        """It was away, and may come back as something that can be used."""
        self._unusable = None

    async def discover(self) -> WorkerInfo:
        """Learn who it is.

        Raises:
            UpstreamError: no answer.
            ProtocolError: an answer that the wire format does not allow.
            UnusableWorkerError: it is no worker of this cluster, and will not become one before
                somebody starts it again.
        """
        if self._unusable is not None:
            raise UnusableWorkerError(self._unusable)
        if self._known_info is not None and await self.check_incarnation() is IncarnationCheck.SAME:
            await self._read_models()
            return self._known_info
        self.adapters = frozenset()
        status, body = await self._upstream.get(
            self._worker.url.with_path(INFO_PATH), self._timeout_s
        )
        match status:
            case HTTPStatus.OK:
                self._known_info = None
                return read_info(body)
            case HTTPStatus.NOT_FOUND:
                self._known_info = await self._discover_vllm()
                return self._known_info
            case HTTPStatus.UNAUTHORIZED:
                raise UpstreamError(_WRONG_KEY)
            case _:
                raise UpstreamError(f"{INFO_PATH} answered {status}: is this a Baton worker?")

    async def check_incarnation(self) -> IncarnationCheck:
        """Whether a vLLM server is still in the incarnation that we know; costs it nothing."""
        known = self._known_info
        if known is None:
            return IncarnationCheck.UNKNOWN
        try:
            reply = await self._ask_control(known)
        except (UpstreamError, ProtocolError, UnusableWorkerError):
            return IncarnationCheck.UNKNOWN
        is_same = (reply.worker, reply.epoch) == (known.worker, known.epoch)
        return IncarnationCheck.SAME if is_same else IncarnationCheck.ANOTHER

    async def _discover_vllm(self) -> WorkerInfo:
        try:
            info = await self._probe_vllm(await self._read_models())
            await self._check_control(info)
        except UnusableWorkerError as exc:
            self._unusable = str(exc)
            raise
        return info

    async def _read_models(self) -> str:
        """The served model's name; notes its adapters."""
        status, body = await self._upstream.get(self._worker.url / "v1/models", self._timeout_s)
        match status:
            case HTTPStatus.OK:
                model, self.adapters = _read_models(body)
                return model
            case HTTPStatus.UNAUTHORIZED:
                raise UnusableWorkerError(
                    "it asks for an API key that is not this cluster's; start it without --api-key"
                )
            case _:
                raise UpstreamError(
                    f"neither {INFO_PATH} nor /v1/models exists there ({status}): "
                    "is this a Baton worker, or a vLLM server?"
                )

    async def _probe_vllm(self, model: str) -> WorkerInfo:
        url = self._worker.completion_urls[COMPLETIONS]
        probe = _DiscoveryProbe(model)
        status, body = await self._upstream.ask(url, msgspec.json.encode(probe), PROBE_TIMEOUT_S)
        if status != HTTPStatus.OK:
            raise UpstreamError(f"it answered {status} to the discovery probe: {read_error(body)}")
        try:
            reply = _discovery_reply_decoder.decode(body).kv_transfer_params
        except UNDECODABLE as exc:
            raise UnusableWorkerError(
                f"its answer to the discovery probe does not decode: {exc}"
            ) from exc
        if reply is None or reply.baton_info is None:
            raise UnusableWorkerError(
                "it runs without Baton's connector; if it is vLLM, start it with "
                f"--kv-transfer-config '{self._connector_config()}'"
            )
        if reply.baton_info.protocol != "vllm":
            raise UnusableWorkerError("its connector does not identify it as a vLLM server")
        return reply.baton_info

    def _connector_config(self) -> str:
        return json.dumps({
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.engines.vllm",
            "kv_role": KV_ROLES[self._worker.address.role],
            "kv_load_failure_policy": "recompute",
        })

    async def _check_control(self, info: WorkerInfo) -> None:
        """Check now whether aborts can be sent to it, not when one is due."""
        if reason := why_not_asked(info, self._worker.url):
            raise UnusableWorkerError(reason)
        try:
            await self._ask_control(info)
        except (UpstreamError, ProtocolError) as exc:
            log.warning("%s does not receive aborts or answer for traces: %s", self._worker, exc)

    async def _ask_control(self, info: WorkerInfo) -> WorkerInfo:
        url = URL(info.control_urls[0]).with_path(INFO_PATH)
        status, body = await self._upstream.get(url, self._timeout_s)
        if status == HTTPStatus.UNAUTHORIZED:
            raise UnusableWorkerError(_WRONG_KEY)
        if status != HTTPStatus.OK:
            raise UpstreamError(f"{url} answered {status}")
        return read_info(body)


_WRONG_KEY: Final = (
    "it does not hold this cluster's key: compare what `baton key fingerprint` prints on both "
    "hosts, and give both processes the same BATON_CLUSTER_KEY"
)


class _InfoWanted(msgspec.Struct, frozen=True):
    baton_info: bool = True


class _DiscoveryProbe(msgspec.Struct, frozen=True):
    """The discovery probe."""

    model: str
    prompt: tuple[int, ...] = (0,)
    max_tokens: int = 1
    temperature: int = 0
    kv_transfer_params: _InfoWanted = _InfoWanted()


class _DiscoveryParams(msgspec.Struct, frozen=True):
    baton_info: WorkerInfo | None = None


class _DiscoveryReply(msgspec.Struct, frozen=True):
    kv_transfer_params: _DiscoveryParams | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


_discovery_reply_decoder = msgspec.json.Decoder(_DiscoveryReply)
_models_decoder = msgspec.json.Decoder(_Models)


def _read_models(body: bytes) -> tuple[str, frozenset[str]]:
    """The served model's name, which comes first, and its adapters', which have a parent."""
    try:
        models = _models_decoder.decode(body).data
    except UNDECODABLE as exc:
        raise ProtocolError(f"its /v1/models does not decode: {exc}") from exc
    if not models:
        raise ProtocolError("its /v1/models is empty")
    adapters = [each.id for each in models[1:] if each.parent is not None]
    if len(adapters) > MAX_ADAPTERS:
        log.warning("%d of %d adapters are served", MAX_ADAPTERS, len(adapters))
    return models[0].id, frozenset(adapters[:MAX_ADAPTERS])


PROBES_WITHOUT: Final = 10
"""So many probes do not ask a control server that did not answer."""


class LoadReader:
    """Asks one worker how loaded it is. Owner: the event loop's thread."""

    def __init__(self, worker: Worker, upstream: Upstream, timeout_s: float, clock: Clock) -> None:
        self._worker, self._upstream, self._timeout_s = worker, upstream, timeout_s
        self._clock, self._clock_domain = clock, read_clock_domain()
        self._num_to_skip = 0

    async def read(self, health: bytes, sent_at: Instant) -> Health | None:
        """What a healthy worker reports: `health` is its answer to a request sent at `sent_at`.

        None where it is asked elsewhere and does not answer. Notes what its clock shows.
        """
        info = self._worker.info
        if info is None or info.protocol == "baton":
            return self._note(health, sent_at)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        # Whose address it is was checked before the worker came up.
        url, sent_at = self._worker.control_urls[0].with_path(HEALTH_PATH), self._clock.now()
        try:
            status, body = await self._upstream.get(url, self._timeout_s)
        except BatonError:
            self._num_to_skip = PROBES_WITHOUT
            return None
        return self._note(body, sent_at) if status == HTTPStatus.OK else None

    def _note(self, body: bytes, sent_at: Instant) -> Health:
        health, received_at = read_health(body), self._clock.now()
        shown = health.clock
        if isinstance(shown, ClockReading):
            if shown.domain == self._clock_domain:
                self._worker.clock.observe_same(shown.domain)
            else:
                self._worker.clock.observe(shown.domain, shown.at_s, sent_at, received_at)
        return health
