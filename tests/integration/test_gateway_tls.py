"""Clients reach a gateway over TLS; its certificate is replaced while it serves."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from baton.cli.main import run as run_cli
from tests.integration.gateway_cluster import STREAM, until_true
from tests.integration.scripted_worker import ScriptedWorker, say_abc
from tests.integration.test_gateway_process import gateway_process

if TYPE_CHECKING:
    import pytest

GATEWAY = ["gateway", "--decode", "https://127.0.0.1:1", "--port", "0"]


def certificate_files(directory: Path, serial_number: int) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key; replaces older ones."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gateway {serial_number}")])
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509
        .CertificateBuilder(name, name, key.public_key(), serial_number)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "tls.crt", directory / "tls.key"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for path, content in zip(paths, (certificate.public_bytes(Encoding.PEM), private), strict=True):
        fresh = path.with_suffix(".new")
        fresh.write_bytes(content)
        Path(fresh).replace(path)
    return paths


def serial_number_at(url: str) -> int:
    port = int(url.rpartition(":")[2])
    shown = ssl.get_server_certificate(("127.0.0.1", port), timeout=30)
    return x509.load_pem_x509_certificate(shown.encode()).serial_number


async def ask(url: str, certificate: Path) -> str:
    """One streamed request by a client that checks who answers."""
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=certificate))
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        client.post(url + "/v1/completions", json=STREAM) as response,
    ):
        assert response.status == 200
        return await response.text()


def test_clients_check_the_gateway_while_its_certificate_changes(tmp_path: Path) -> None:
    tls = certificate_files(tmp_path, 1)

    async def shows(url: str, serial_number: int) -> bool:
        return await asyncio.to_thread(serial_number_at, url) == serial_number

    async def main() -> None:
        worker = ScriptedWorker("worker-0", "both", say_abc)
        async with (
            asyncio.timeout(30),
            worker.running(),
            gateway_process(worker, tls=tls) as gateway,
        ):
            assert gateway.url.startswith("https://")

            async def answers() -> bool:
                try:
                    return (await ask(gateway.url, tls[0])).endswith("[DONE]\n\n")
                except AssertionError:  # no worker is known yet
                    return False

            await until_true(answers)
            assert await shows(gateway.url, 1)

            tls[1].write_text("half a key")
            await asyncio.sleep(1.2)  # files are looked at once a second
            assert await shows(gateway.url, 1), "files that cannot be used change nothing"
            assert await answers()

            certificate_files(tmp_path, 2)
            await until_true(lambda: shows(gateway.url, 2))
            assert await answers()

    asyncio.run(main())


def test_who_speaks_no_tls_reads_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        worker = ScriptedWorker("worker-0", "both", say_abc)
        async with (
            asyncio.timeout(30),
            worker.running(),
            gateway_process(worker, tls=certificate_files(tmp_path, 1)) as gateway,
            aiohttp.ClientSession() as client,
            client.get(gateway.url.replace("https:", "http:") + "/v1/models") as response,
        ):
            assert response.status == 400
            assert "https://" in (await response.json())["error"]["message"]

    asyncio.run(main())


def test_files_that_cannot_be_used_are_refused_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = map(str, certificate_files(tmp_path, 1))
    assert run_cli([*GATEWAY, "--tls-certificate", certificate]) == 2
    assert "go together" in capsys.readouterr().err
    missing = str(tmp_path / "none.key")
    assert run_cli([*GATEWAY, "--tls-certificate", certificate, "--tls-key", missing]) == 2
    assert missing in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    other = str(certificate_files(tmp_path / "other", 2)[1])
    assert run_cli([*GATEWAY, "--tls-certificate", certificate, "--tls-key", other]) == 2
    assert "mismatch" in capsys.readouterr().err
    assert key != other
