"""Runs vLLM's OpenAI server in this process, with Baton's connector configured."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NoReturn
from urllib.parse import urlsplit

import msgspec
import uvloop

from baton.clock import MachineClock
from baton.config.cluster_key import is_loopback
from baton.config.environment import change_environment
from baton.engines.vllm import resumed_streams
from baton.engines.vllm.access_middleware import DRAIN_STATE
from baton.engines.vllm.arguments import (
    REMOVED_VARIABLES,
    LaunchParameters,
    check_model,
    check_room,
    find_platform,
    find_relayed,
    server_arguments,
    server_environment,
)
from baton.engines.vllm.compatibility import check_data_parallel
from baton.engines.vllm.engine_process import server_variables
from baton.engines.vllm.event_relay import relay_events
from baton.engines.vllm.options import VllmOptions, require_cpu_block_size
from baton.errors import UNDECODABLE, BatonError, ConfigError, EngineError
from baton.ids import Epoch, WorkerId
from baton.net.http_limits import WORKER_LIMITS, Connections, allow_descriptors
from baton.net.http_server import bounded_protocol, ignore_relayed
from baton.net.preemption import PreemptionWatch
from baton.net.probes import serve_probes
from baton.net.tls import ClusterTls, Tls
from baton.protocol.worker_http import HEALTH_PATH
from baton.registry import Plugin
from baton.telemetry.process_status import Draining, Loading, Ready

if TYPE_CHECKING:
    import ssl
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

    from baton.engines.interface import EngineServer, ServerContext, ServerMembership

RETRY_INTERVAL_S: Final = 0.1
REQUEST_TIMEOUT_S: Final = 60.0
"""The first request of a server may compile kernels."""


class ProbedIdentity(msgspec.Struct, frozen=True):
    """What a launcher must know of the server's `WorkerInfo`."""

    worker: str
    epoch: str
    handoff_address: str


class _Params(msgspec.Struct, frozen=True):
    baton_info: ProbedIdentity


class _Completion(msgspec.Struct, frozen=True):
    kv_transfer_params: _Params


async def wait_healthy(url: str, tls: ssl.SSLContext | None) -> None:
    """Until the server answers that its engine is well. Never, if it never does."""
    # Polled, as vLLM gives no notification.
    while await asyncio.to_thread(_status, url, HEALTH_PATH, tls) != HTTPStatus.OK:  # noqa: ASYNC110
        await asyncio.sleep(RETRY_INTERVAL_S)


async def fetch_identity(
    url: str, model: str, headers: Mapping[str, str], tls: ssl.SSLContext | None
) -> ProbedIdentity:
    """The discovery probe: a completion of one token, answered with who the server is.

    Raises:
        EngineError: the server answers, but Baton's connector in it does not.
    """
    return read_identity(await asyncio.to_thread(_complete, url, model, headers, tls))


def read_identity(body: bytes) -> ProbedIdentity:
    """Read the answer to a discovery probe.

    Raises:
        EngineError: its answer is not that of Baton's connector.
    """
    try:
        return msgspec.json.decode(body, type=_Completion).kv_transfer_params.baton_info
    except UNDECODABLE as exc:
        raise EngineError(
            f"vLLM answers, but not with what Baton's connector answers: {body[:300]!r}"
        ) from exc


def _complete(
    url: str, model: str, headers: Mapping[str, str], tls: ssl.SSLContext | None
) -> bytes:
    question = {
        "model": model,
        "prompt": [0],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"baton_info": True},
    }
    connection = _connect(url, tls)
    try:
        body = msgspec.json.encode(question)
        connection.request(
            "POST", "/v1/completions", body, {"content-type": "application/json", **headers}
        )
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException) as exc:
        raise EngineError(f"vLLM is well, but does not answer a request: {exc}") from exc
    finally:
        connection.close()


def _status(url: str, path: str, tls: ssl.SSLContext | None) -> int:
    """The HTTP status of a GET; 0 without an answer."""
    connection = _connect(url, tls)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _connect(url: str, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound here
    if tls is None:
        return http.client.HTTPConnection(reached, parts.port, timeout=REQUEST_TIMEOUT_S)
    return http.client.HTTPSConnection(reached, parts.port, timeout=REQUEST_TIMEOUT_S, context=tls)


logger = logging.getLogger(__name__)

INSTALL_HINT: Final = (
    "run `make install ENGINE=vllm` (vLLM's build for CPUs), or on a machine with GPUs install "
    "vLLM's own build into the same environment"
)
CHILD_END_TIMEOUT_S: Final = 5.0
LEASE_FILE: Final = "lease"


class ServerLifecycle:
    """From start to end of one vLLM server. Owned by the main thread and its event loop."""

    def __init__(
        self, context: ServerContext, watch: PreemptionWatch, relayed: tuple[str, str] | None
    ) -> None:
        self._context, self._watch, self._relayed = context, watch, relayed
        self._status_reporter = context.status_reporter
        self._ending: asyncio.Task[None] | None = None
        self._is_ready = False
        self._announcing: asyncio.Task[None] | None = None
        self._tls: ClusterTls | None = None
        if context.config.security.tls != "off":
            self._tls = ClusterTls(context.credentials)

    def run(self, arguments: Sequence[str]) -> None:
        """Import vLLM, start it, serve until a signal.

        Raises:
            ConfigError: vLLM could not start.
            EngineError: it ended by itself, or Baton's connector is not in it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal_while_loading)
        self._watch.start()
        self._announce_loading("importing vLLM")
        args = _parse(arguments)
        self._announce_loading("starting vLLM's engine")
        with asyncio.Runner(loop_factory=partial(_ServerLoop, self._on_signal)) as runner:
            try:
                runner.run(self._serve(args))
            except BatonError:
                raise
            except Exception as exc:
                raise self._explained(exc) from exc
        if self._ending is None:
            raise EngineError("vLLM's engine ended by itself; the log above has the reason")

    async def _serve(self, args: Namespace) -> None:
        from vllm.entrypoints.launchers.api_server.entry import run_server_worker  # noqa: PLC0415

        resumed_streams.install()
        worker = self._context.config.worker
        async with (
            serve_probes(worker.host, worker.probe_port, self._is_well),
            relay_events(self._relayed, WorkerId(worker.name), DRAIN_STATE),
        ):
            server = asyncio.create_task(
                run_server_worker(
                    self._context.url,
                    self._context.listener,
                    args,
                    http=bounded_protocol(_connections(self._tls)),
                )
            )
            ready = asyncio.create_task(self._announce_ready())
            await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not server.done():
                ready.result()
            await server
            ready.cancel()

    async def _is_well(self) -> bool:
        """For probes: by a request to itself, as vLLM shows its health in no other way."""
        tls = None if self._tls is None else self._tls.dialing
        status = await asyncio.to_thread(_status, self._context.url, HEALTH_PATH, tls)
        return self._is_ready and status == HTTPStatus.OK

    async def _announce_ready(self) -> None:
        context, url = self._context, self._context.url
        tls = None if self._tls is None else self._tls.dialing
        await wait_healthy(url, tls)
        self._announce_loading("first request")
        bearer = (
            {}
            if DRAIN_STATE.bearer is None
            else {"authorization": f"Bearer {DRAIN_STATE.bearer.decode()}"}
        )
        identity = await fetch_identity(url, context.served_model_name, bearer, tls)
        self._is_ready = True
        worker = context.config.worker
        self._status_reporter.report(
            Ready(url, identity.worker, identity.epoch, worker.role, identity.handoff_address)
        )
        logger.info(
            "%s answers at %s, hands over at %s", worker.name, url, identity.handoff_address
        )
        if context.membership is not None:
            DRAIN_STATE.why_fenced = context.membership.why_fenced
            self._announcing = asyncio.create_task(self._announce(context.membership, identity))

    async def _announce(self, membership: ServerMembership, identity: ProbedIdentity) -> None:
        try:
            status = await membership.run(
                WorkerId(identity.worker), Epoch(identity.epoch), self._context.url, self._on_fenced
            )
        except Exception:
            logger.exception("announcing has failed: this worker ends")
            status = 1
        self._exit(status)

    def _on_fenced(self, reason: str) -> None:
        logger.error("%s; %d requests are ended", reason, DRAIN_STATE.num_open)
        DRAIN_STATE.end_requests()

    def _announce_loading(self, phase: str) -> None:
        context = self._context
        self._status_reporter.report(
            Loading(context.url, f"model {context.model} with engine vllm", phase)
        )
        logger.info("%s: %s", context.config.worker.name, phase)

    def _explained(self, exc: Exception) -> BatonError:
        if self._is_ready:
            return EngineError(f"vLLM's server ended: {exc}")
        return ConfigError(f"vLLM could not start: {exc}\n(see the lines above, if any)")

    # Signals

    def _on_signal_while_loading(self, number: int, _: object) -> NoReturn:
        logger.info("%s while loading: leaving", signal.Signals(number).name)
        self._status_reporter.report(Draining(0.0))
        self._exit(0)

    def _on_signal(self, number: int, stop: Callable[[], object]) -> None:
        """`stop` is vLLM's own handler."""
        timeout_s = self._watch.note_signal(self._context.config.worker.drain_timeout_s)
        if timeout_s is None:
            if ignore_relayed(number):
                return
            logger.warning("a second signal: leaving at once")
            self._exit(128 + number)
        name = signal.Signals(number).name
        logger.info("%s: no more requests, %d are being answered", name, DRAIN_STATE.num_open)
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.create_task(self._drain(timeout_s, stop))

    async def _drain(self, timeout_s: float, stop: Callable[[], object]) -> None:
        DRAIN_STATE.start_drain()
        try:
            async with asyncio.timeout(timeout_s):
                await DRAIN_STATE.wait_drained()
        except TimeoutError:
            logger.warning("%d requests were not answered in time", DRAIN_STATE.num_open)
            self._exit(0)
        if self._announcing is not None and self._context.membership is not None:
            self._announcing.cancel()
            await self._context.membership.leave()
        stop()

    def _exit(self, status: int) -> NoReturn:
        """End the engine and this process, without waiting for anything."""
        for child in multiprocessing.active_children():
            child.kill()
            child.join(CHILD_END_TIMEOUT_S)
        shutil.rmtree(self._context.run_directory, ignore_errors=True)
        os._exit(status)


class _ServerLoop(uvloop.Loop):  # type: ignore[misc]
    """An event loop that passes signals to Baton before vLLM, which registers them on the loop."""

    def __init__(self, on_signal: Callable[[int, Callable[[], object]], None]) -> None:
        self._on_signal = on_signal

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: object) -> None:
        super().add_signal_handler(sig, self._on_signal, sig, partial(callback, *args))


def _connections(tls: Tls | None) -> Connections:
    return Connections(allow_descriptors(WORKER_LIMITS), MachineClock(), lambda _: None, tls)


def _parse(arguments: Sequence[str]) -> Namespace:
    """Read by the parser of vLLM: a wrong flag ends the process with exit code 2.

    Raises:
        ConfigError: vLLM cannot be used, or would start several engines.
    """
    try:
        from vllm.entrypoints.launchers.cli_args import (  # noqa: PLC0415 - seconds to import
            make_arg_parser,
            validate_parsed_serve_args,
        )
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(f"vLLM is installed, but cannot be used: {exc}; {INSTALL_HINT}") from exc
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="engine.arguments"))
    args: Namespace = parser.parse_args(list(arguments))
    validate_parsed_serve_args(args)
    is_external = args.data_parallel_external_lb or args.data_parallel_rank is not None
    check_data_parallel(args.data_parallel_size, is_external=is_external)
    return args


def serve(options: VllmOptions, context: ServerContext) -> None:
    """Run the server until it is stopped; blocks."""
    platform = find_platform()
    check_model(context.model)
    if platform == "cpu":
        require_cpu_block_size(options)
        check_room(options, context.model)
    config = context.config
    cores = sorted(os.sched_getaffinity(0))
    # Before anything imports torch or vLLM: they read the environment on import.
    environment = server_environment(options, config.log.level, cores, platform)
    own = server_variables(config.log, context.run_directory)
    change_environment({**environment, **own}, REMOVED_VARIABLES)
    if config.security.tls == "off" and not is_loopback(config.worker.host):
        DRAIN_STATE.bearer = context.credentials.key.sign("http", b"worker").hex().encode()
    lease_file = None if context.membership is None else context.run_directory / LEASE_FILE
    launch = LaunchParameters(
        model=context.model,
        served_model_name=context.served_model_name,
        port=context.listener.getsockname()[1],
        run_directory=context.run_directory,
        platform=platform,
        lease_file=lease_file,
    )
    _make_private(context)
    if context.membership is not None and lease_file is not None:
        context.membership.open(lease_file)
    try:
        watch = PreemptionWatch(
            config.preemption, config.worker.name, MachineClock(), context.status_reporter
        )
        DRAIN_STATE.describe_drain = watch.describe_health
        relayed = find_relayed(options, config, context.run_directory)
        ServerLifecycle(context, watch, relayed).run(server_arguments(options, config, launch))
    finally:
        shutil.rmtree(context.run_directory, ignore_errors=True)


def _make_private(context: ServerContext) -> None:
    """An empty run directory that only this user may enter: events name the prompts' tokens."""
    directory = context.run_directory
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.parent.stat().st_uid != os.getuid():
            raise ConfigError(f"{directory.parent} belongs to another user; set XDG_RUNTIME_DIR")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
    except OSError as exc:
        raise ConfigError(f"cannot keep sockets in {directory}: {exc.strerror}") from exc


def _build(options: VllmOptions) -> EngineServer:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"the engine vllm needs vLLM, which is not installed in {sys.prefix}: {INSTALL_HINT}"
        )
    return partial(serve, options)


PLUGIN: Plugin[VllmOptions, EngineServer] = Plugin(VllmOptions, _build)
