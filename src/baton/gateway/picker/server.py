"""The endpoint picker's process: its gRPC server, its health, its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.clock import MachineClock
from baton.config.cluster_key import is_loopback
from baton.errors import ConfigError
from baton.gateway.asgi import BodyBudget, BodyLimit
from baton.gateway.picker.processing import Processing
from baton.gateway.process import managing, open_parts
from baton.net.tls import ServerTls
from baton.telemetry.process_status import Ready, StatusReporter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

    from baton.gateway.options import GatewayOptions
    from baton.gateway.request_context import Services

HEALTH_LOOK_S: Final = 0.5
FRAMING_BYTES: Final = 1 << 20
"""Beyond a request's body, of one message."""
READINESS: Final = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
LIVENESS: Final = "liveness"

log = logging.getLogger(__name__)


class EndpointPicker(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """Envoy's service `ExternalProcessor`. Owner: the event loop's thread."""

    def __init__(self, services: Services) -> None:
        self._services, options = services, services.options
        self._bodies = BodyBudget(options.max_total_body_bytes)
        self._limit = BodyLimit(options.max_body_bytes, lambda: options.max_body_bytes)

    async def Process(  # noqa: N802 - as the service names it
        self,
        request_iterator: AsyncIterable[external_processor_pb2.ProcessingRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[external_processor_pb2.ProcessingResponse]:
        """One stream for each HTTP request."""
        processing = Processing(self._services, self._bodies, self._limit)
        context.add_done_callback(lambda _: processing.close())
        async for answer in processing.run(request_iterator):
            yield answer


@asynccontextmanager
async def serving_picker(services: Services) -> AsyncGenerator[int]:
    """The gRPC server, for as long as the block runs; its port.

    Raises:
        ConfigError: it cannot listen there, or the files of its certificate cannot be used.
    """
    options = services.options
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", options.max_body_bytes + FRAMING_BYTES),
            ("grpc.so_reuseport", 0),
        ),
        maximum_concurrent_rpcs=options.max_connections,
    )
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(
        EndpointPicker(services), server
    )
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        port = _listen(server, f"{host}:{options.port}", options)
    except RuntimeError as exc:
        raise ConfigError(f"cannot listen on {host}:{options.port}: {exc}") from exc
    await server.start()
    watching = asyncio.create_task(_report_health(checks, services))
    try:
        yield port
    finally:
        watching.cancel()
        await checks.enter_graceful_shutdown()
        await server.stop(options.drain_timeout_s)


class ServedCertificate:
    """The certificate that Envoy is shown; follows its files, as `ServerTls` does. Thread-safe.

    Raises:
        ConfigError: a file cannot be read, or the key is not the certificate's.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._tls, self._lock = ServerTls(certificate, key, MachineClock()), threading.Lock()
        self._shown = self._tls.listening

    def read(self) -> grpc.ServerCertificateConfiguration:
        """As the files are now; raises OSError."""
        pair = self._key.read_bytes(), self._certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair])

    def find_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """For a handshake, from a thread of gRPC's; None: the one before stays in use."""
        with self._lock:
            if (usable := self._tls.listening) is self._shown:
                return None
            try:
                changed = self.read()
            except OSError:  # they change again: they are read at the next handshake
                return None
            self._shown = usable
            return changed


def _listen(server: grpc.aio.Server, address: str, options: GatewayOptions) -> int:
    if options.tls_certificate and options.tls_key:
        served = ServedCertificate(Path(options.tls_certificate), Path(options.tls_key))
        followed = grpc.dynamic_ssl_server_credentials(served.read(), served.find_changed)
        return int(server.add_secure_port(address, followed))
    if not is_loopback(options.host):
        log.warning(
            "Envoy reaches %s without encryption: give --tls-certificate and --tls-key", address
        )
    return int(server.add_insecure_port(address))


async def _report_health(checks: health.aio.HealthServicer, services: Services) -> None:
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    await checks.set(LIVENESS, serving)
    while True:
        is_ready = services.workers.fleet.can_decode
        for name in READINESS:
            await checks.set(name, serving if is_ready else not_serving)
        await asyncio.sleep(HEALTH_LOOK_S)


def run_picker(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; belongs on the main thread.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    asyncio.run(_run(options))


async def _run(options: GatewayOptions) -> None:
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    async with (
        open_parts(options, MachineClock()) as (app, services),
        managing(options, app),
        serving_picker(services) as port,
    ):
        host = f"[{options.host}]" if ":" in options.host else options.host
        scheme = "grpcs" if options.tls_certificate else "grpc"
        StatusReporter(options.status_fd).report(Ready(f"{scheme}://{host}:{port}"))
        log.info("picks endpoints at %s:%d", host, port)
        await ending.wait()
        log.info("no more requests, draining")
