"""`baton debug bundle` as a person runs it: against a gateway, with secrets planted everywhere, and
against gateways that hang, drip, answer too much or nonsense."""

import asyncio
import http.server
import json
import os
import stat
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.cli.main import run as main
from tests.integration import patient_doctor
from tests.integration.gateway_cluster import PROMPT, run
from tests.integration.patient_doctor import TRIED_TRANSPORTS

ROOT = Path(__file__).parents[2]
BUNDLE = (sys.executable, "-m", patient_doctor.__name__, "debug", "bundle")
TIMEOUT_S = 100
CLOSED = "http://127.0.0.1:1"
KEY = "fedcba9876543210" * 4
SECRETS = {
    name: f"planted{number}-Qz8kX2vB"
    for number, name in enumerate((
        "url user", "option", "password file", "variable", "log", "header", "prompt", "cookie",
        "webhook", "tenant", "page", "label", "redirect",
    ))
} | {"key file": KEY}  # fmt: skip


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def read_archive(path):
    """Its files by name, and what its manifest lists as missing."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        assert all(entry.isreg() and entry.mode == 0o600 for entry in archive)
        files = {
            entry.name.removeprefix("baton-bundle/"): archive.extractfile(entry).read()
            for entry in archive
        }
    manifest = json.loads(files["manifest.json"])
    assert {each["name"] for each in manifest["files"]} == set(files) - {"manifest.json"}
    return files, {each["name"]: each["why"] for each in manifest["missing"]}


def plant(tmp_path, monkeypatch):
    """A configuration, a key file, variables and a log with secrets in them: arguments."""
    key = tmp_path / "cluster.key"
    key.write_text(KEY)
    key.chmod(0o600)
    password = tmp_path / "password"
    password.write_text(SECRETS["password file"])
    config = tmp_path / "baton.toml"
    config.write_text(
        f"""
[cluster]
key_file = "{key}"
[alerts]
webhook_url = "https://hooks.example/{SECRETS["webhook"]}"
[gateway]
decode = ["http://{SECRETS["url user"]}:{SECRETS["url user"]}@127.0.0.1:1"]
[store.options.redis]
url = "redis://{SECRETS["url user"]}@127.0.0.1:1/0"
password_file = "{password}"
[engine]
hub_credential = "{SECRETS["option"]}"
"""
    )
    logs = tmp_path / "state" / "baton" / "fleets" / "default" / "logs"
    logs.mkdir(parents=True)
    (logs / "gateway.log").write_text(
        f"10:00:00 INFO baton.gateway: listening on http://127.0.0.1:8000\n"
        f"authorization: Bearer {SECRETS['log']}\n"
        f"cookie: a=1; b={SECRETS['log']}\n"
        f"POST https://x:{SECRETS['log']}@host/path?token={SECRETS['log']} failed\n"
        f"prompt: '{SECRETS['log']}'\n"
        f"with {KEY} and {SECRETS['option']} and {SECRETS['password file']}\n"
        f"and {SECRETS['variable']} and hooks.example/{SECRETS['webhook']}\n"
    )
    for name in ("HUB_TOKEN", "BATON_REDIS_PASSWORD"):
        monkeypatch.setenv(name, SECRETS["variable"])
    return ["--config", str(config)]


def printed(capsys):
    found = capsys.readouterr()
    return {"standard output": found.out.encode(), "standard error": found.err.encode()}


def assert_no_secret(texts):
    for place, content in texts.items():
        for name, secret in SECRETS.items():
            assert secret.encode() not in content, f"{name} is in {place}"


def test_a_gateways_pages_and_no_secret(tmp_path, monkeypatch, capsys):
    arguments = plant(tmp_path, monkeypatch)

    async def scenario(cluster):
        body = {**PROMPT, "prompt": SECRETS["prompt"], "user": SECRETS["tenant"]}
        headers = {
            "authorization": f"Bearer {SECRETS['header']}",
            "cookie": SECRETS["cookie"],
            "x-request-id": "request-1",
        }
        async with cluster.post(body, **headers) as response:
            assert response.status == 200
        assert any(SECRETS["prompt"] in str(v.body) for w in cluster.decodes for v in w.visits)
        output = tmp_path / "bundle.tar.gz"
        words = ["debug", "bundle", "-o", str(output), "--gateway", cluster.url, "--no-doctor"]
        assert await asyncio.to_thread(main, [*words, *arguments]) == 0
        files, missing = read_archive(output)
        assert_no_secret({**files, **printed(capsys)})
        for name in ("config.json", "versions.json", "logs/gateway.log"):
            assert name in files
        assert b"listening on http://127.0.0.1:8000" in files["logs/gateway.log"]
        assert json.loads(files["versions.json"])["packages"]["aiohttp"]
        metrics = files["gateway-0/metrics.txt"].decode()
        assert 'baton_gateway_requests_total{code="200",mode="push",model="demo"} 1.0' in metrics
        workers = json.loads(files["gateway-0/debug-workers.json"])["workers"]
        assert {each["state"] for each in workers} == {"up"}
        trace = json.loads(files["gateway-0/requests/000.json"])
        assert (trace["id"], trace["status"]) == ("request-1", 200)
        assert trace["gateway"]["stamps"]
        for page in ("queue", "links", "demand", "requests", "transfers"):
            assert f"gateway-0/debug-{page}.json" in files, missing
        # Workers without TLS want a bearer, which is not sent.
        assert "HTTP 401" in missing["gateway-0/workers/000-metrics.txt"]
        assert "doctor.json" in missing

    run(scenario)


def test_the_doctors_report_is_a_part(tmp_path, monkeypatch):
    arguments = plant(tmp_path, monkeypatch)
    output = tmp_path / "bundle.tar.gz"
    # A process of its own: the doctor forks, and this one has threads.
    done = subprocess.run(
        [
            *BUNDLE,
            "-o",
            str(output),
            "--gateway",
            CLOSED,
            "--no-logs",
            *arguments,
            "--set",
            "store.tiers=redis",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), TRIED_TRANSPORTS: "tcp"},
        capture_output=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    files, missing = read_archive(output)
    assert_no_secret({**files, "standard output": done.stdout, "standard error": done.stderr})
    assert done.returncode == 1, "no gateway answered"
    assert f"missing: gateway-0/metrics.txt: {CLOSED}/metrics".encode() in done.stdout
    assert "Cannot connect" in missing["gateway-0/metrics.txt"]
    findings = json.loads(files["doctor.json"])["findings"]
    assert {"transports", "store", "versions"} <= {each["area"] for each in findings}
    assert any(each["name"] == "tcp" and each["level"] == "ok" for each in findings)
    assert not any(name.startswith("logs/") for name in files)
    assert "logs" in missing


class Hostile(http.server.BaseHTTPRequestHandler):
    """Planted strings under names that nothing lists; and pages that hang, drip or never end."""

    ended = threading.Event()

    def do_GET(self):
        match self.path:
            case "/ready":
                self.ended.wait(TIMEOUT_S)
            case "/debug/queue":
                self.send(200, b"", length=100)
                while not self.ended.wait(0.2):
                    self.wfile.write(b" ")
            case "/debug/links":
                self.send(200, b"", length=1 << 40)
                while True:
                    self.wfile.write(b"x" * 65536)
            case "/alerts":
                error = {"message": "\x1b[2J not now", "type": "server_error"}
                self.send(500, json.dumps({"error": error}).encode())
            case "/debug/demand":
                self.send(200, b"\xff<html>")
            case "/debug/transfers":
                self.send(302, b"", location=f"http://127.0.0.1:1/{SECRETS['redirect']}")
            case "/metrics":
                self.send(200, f'up{{tenant="{SECRETS["label"]}"}} 1\n{SECRETS["page"]}\n'.encode())
            case "/debug/workers":
                url = f"http://u:{SECRETS['url user']}@127.0.0.1:1"
                self.send_json({
                    "workers": [{"url": url, "worker": "w"}, {"url": "file:///etc/passwd"}]
                })
            case "/debug/requests":
                ids = ["../../etc/passwd", f"a?token={SECRETS['page']}", "c"]
                self.send_json({"requests": [{"id": each} for each in ids]})
            case _:
                self.send_json({"prompt": SECRETS["page"], "mode": "push", "tokens": [1, 2]})

    def send_json(self, page):
        self.send(200, json.dumps(page).encode())

    def send(self, status, body, length=None, location=None):
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        if location:
            self.send_header("location", location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def hostile_gateway():
    Hostile.ended.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads, server.block_on_close = True, False
    server.handle_error = lambda *_: None  # clients leave
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        Hostile.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_gateway_that_hangs_and_lies_costs_its_pages_only(tmp_path, capsys):
    output = tmp_path / "bundle.tar.gz"
    with hostile_gateway() as url:
        began = time.monotonic()
        words = ["debug", "bundle", "-o", str(output), "--gateway", url]
        assert main([*words, "--no-doctor", "--no-logs", "--timeout-s", "1.5"]) == 0
        assert time.monotonic() - began < TIMEOUT_S / 3
    files, missing = read_archive(output)
    shown = printed(capsys)
    assert_no_secret({**files, **shown})
    assert b"not now" in shown["standard output"]
    assert b"\x1b" not in shown["standard output"]
    for page in ("ready", "debug-queue"):
        assert "within the time" in missing[f"gateway-0/{page}.json"]
    assert "more than" in missing["gateway-0/debug-links.json"]
    assert "not JSON" in missing["gateway-0/debug-demand.json"]
    assert "HTTP 302" in missing["gateway-0/debug-transfers.json"]
    assert files["gateway-0/metrics.txt"] == b'up{tenant="(cut)"} 1\n'
    assert "HOST:PORT" in missing["gateway-0/workers/000-metrics.txt"]
    assert "HOST:PORT" in missing["gateway-0/workers/001-metrics.txt"]
    trace = json.loads(files["gateway-0/requests/000.json"])
    assert trace == {"prompt": "(cut)", "mode": "push", "tokens": ["(cut)", "(cut)"]}
    assert sum(map(len, files.values())) < 1 << 20


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gateway", "127.0.0.1:8000"],
        ["--gateway", "http://user:pass@127.0.0.1:8000"],
        ["--requests", "-1"],
        ["--timeout-s", "0"],
    ],
)
def test_a_wrong_command_line_exits_with_2(tmp_path, arguments):
    output = tmp_path / "bundle.tar.gz"
    assert main(["debug", "bundle", "-o", str(output), "--no-doctor", *arguments]) == 2
    assert not output.exists()
