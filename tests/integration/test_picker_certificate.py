"""The certificate that the endpoint picker shows to Envoy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from baton.auth.credentials import Credentials
from baton.errors import ConfigError
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.picker.server import _listen
from baton.net import tls
from baton.protocol.worker_http import Role
from tests.integration.test_gateway_tls import certificate_files, serial_number_at

if TYPE_CHECKING:
    from pathlib import Path


def listen(server: grpc.aio.Server, certificate: Path, key: Path) -> int:
    options = GatewayOptions(
        addresses=(WorkerAddress("https://127.0.0.1:1", Role.BOTH),),
        credentials=Credentials.generate(),
        key_origin="configured",
        tls_certificate=str(certificate),
        tls_key=str(key),
    )
    return _listen(server, "127.0.0.1:0", options)


def test_files_that_change_are_taken_up_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "RELOAD_INTERVAL_S", 0.0)

    async def scenario() -> None:
        certificate, key = certificate_files(tmp_path, 1)
        server = grpc.aio.server()
        url = f"https://127.0.0.1:{listen(server, certificate, key)}"
        await server.start()
        try:
            assert await asyncio.to_thread(serial_number_at, url) == 1
            certificate_files(tmp_path, 2)
            assert await asyncio.to_thread(serial_number_at, url) == 2
            certificate.write_text("no certificate")
            assert await asyncio.to_thread(serial_number_at, url) == 2
        finally:
            await server.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("content", [None, "no key"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, content: str | None) -> None:
    certificate, _ = certificate_files(tmp_path, 1)
    other = tmp_path / "other.key"
    if content is not None:
        other.write_text(content)

    async def scenario() -> None:
        listen(grpc.aio.server(), certificate, other)

    with pytest.raises(ConfigError, match=r"other\.key"):
        asyncio.run(scenario())
