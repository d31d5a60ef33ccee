"""Identities of an authority: roles, rotation while requests run, and what was revoked."""

from __future__ import annotations

import json
import shutil
import ssl
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from baton.auth.certificates import read_certificate
from baton.auth.credentials import Credentials
from baton.cli.main import run
from baton.net.tls import ClusterTls
from tests.e2e.client import KEY, ask_all, make_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import WorkerCluster

OWN = ("tcp-prefill", "tcp-decode", "tcp-gateway")


def status_of(url: str, directory: Path, body: dict[str, object] | None = None) -> int:
    """0: no connection."""
    context = ClusterTls(Credentials.from_directory(directory, KEY.key)).dialing
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError, ssl.SSLError):
        return 0


def key(*words: object) -> None:
    assert run(["key", *map(str, words)]) == 0


def test_what_each_role_may_ask_a_worker(cluster: WorkerCluster, tmp_path: Path) -> None:
    for role in ("gateway", "worker", "monitor"):
        holder = ("--role", role, "--name", "test")
        key("issue", tmp_path / role, "--authority", cluster.authority, *holder)
    url, body = cluster.tcp_decode.url, {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 1}
    seen = {
        role: (
            status_of(f"{url}/health", tmp_path / role),
            status_of(f"{url}/metrics", tmp_path / role),
            status_of(f"{url}/baton/v1/info", tmp_path / role),
            status_of(f"{url}/v1/completions", tmp_path / role, body),
        )
        for role in ("gateway", "worker", "monitor")
    }
    assert seen == {
        "gateway": (200, 200, 200, 200),
        "worker": (403, 403, 403, 403),
        "monitor": (200, 200, 403, 403),
    }


def test_rotation_while_requests_run(cluster: WorkerCluster, tmp_path: Path) -> None:
    """Each step waits until every process has taken it up, as an operator would."""
    prompts = make_prompts(6, seed=40, longest=300)
    expected = ask_all(cluster.colocated.url, prompts)
    old = tmp_path / "old"
    shutil.copytree(cluster.identities / "tcp-gateway", old)
    health = f"{cluster.tcp_prefill.url}/health"
    assert status_of(health, old) == 200
    new = cluster.identities / "authority-2"
    key("authority", new)
    is_over = False

    def load() -> int:
        num_rounds = 0
        while not is_over or not num_rounds:
            assert ask_all(cluster.tcp_gateway.url, prompts) == expected
            num_rounds += 1
        return num_rounds

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load)
        try:
            for step in (["--trust-only"], [], ["--drop-old"]):
                for name in OWN:
                    directory = cluster.identities / name
                    before = read_certificate((directory / "tls.crt").read_bytes())[1]
                    key("rotate", directory, "--authority", new, *step)
                    after = read_certificate((directory / "tls.crt").read_bytes())[1]
                    assert (after.serial_number == before.serial_number) == bool(
                        step == ["--trust-only"]
                    )
                time.sleep(3.0)  # files are looked at once a second
        finally:
            is_over = True
        assert running.result(timeout=60)
    assert status_of(health, old) == 0, "the old authority is trusted no longer"
    assert status_of(health, cluster.identities / "tcp-gateway") == 200
    assert ask_all(cluster.tcp_gateway.url, prompts) == expected


def test_what_was_revoked_is_refused(cluster: WorkerCluster, tmp_path: Path) -> None:
    authority = cluster.authority
    key("issue", tmp_path / "m", "--authority", authority, "--role", "monitor", "--name", "stolen")
    health = f"{cluster.tcp_decode.url}/health"
    assert status_of(health, tmp_path / "m") == 200
    key("revoke", "stolen", "--authority", authority)
    for name in OWN:
        shutil.copy(authority / "ca.crl", cluster.identities / name / "ca.crl")
    deadline = time.monotonic() + 30
    while status_of(health, tmp_path / "m") != 0:  # files are looked at once a second
        assert time.monotonic() < deadline
        time.sleep(0.1)
    prompts = make_prompts(2, seed=41, longest=100)
    assert ask_all(cluster.tcp_gateway.url, prompts) == ask_all(cluster.colocated.url, prompts)
