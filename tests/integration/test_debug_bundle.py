"""`baton debug bundle` as a person runs it: against a gateway, with secrets planted everywhere, and
against gateways that hang, drip, answer too much or nonsense."""

import asyncio
import http.server
import json
import os
import stat
import sys
import tarfile
import threading
import time
from contextlib import contextmanager

import pytest

from tests.forked_module import run_forked
from tests.integration.gateway_cluster import PROMPT, run

BUNDLE = (sys.executable, "-m", "baton.cli", "debug", "bundle")
TIMEOUT_S = 100
KEY = "fedcba9876543210" * 4
SECRETS = {
    name: f"planted{number}-Qz8kX2vB"
    for number, name in enumerate((
        "url user", "option", "password file", "variable", "log", "header", "prompt", "cookie",
        "webhook", "tenant", "page", "label", "redirect",
    ))
} | {"key file": KEY}  # fmt: skip


def environment(tmp_path, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state"), **variables}


def bundle(tmp_path, *arguments, **variables):
    """The archive's files by name, its manifest, and how the command ended."""
    output = tmp_path / "bundle.tar.gz"
    command = [*BUNDLE, "--output", str(output), *arguments]
    done = run_forked(command, environment(tmp_path, **variables), TIMEOUT_S)
    assert "Traceback" not in done.stderr, done.stderr
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    with tarfile.open(output) as archive:
        assert all(entry.isreg() and entry.mode == 0o600 for entry in archive)
        files = {
            entry.name.removeprefix("baton-bundle/"): archive.extractfile(entry).read()
            for entry in archive
        }
    manifest = json.loads(files["manifest.json"])
    assert {each["name"] for each in manifest["files"]} == set(files) - {"manifest.json"}
    return files, {each["name"]: each["why"] for each in manifest["missing"]}, done


def plant(tmp_path):
    """A configuration, a key file and a log with secrets in them: arguments and variables."""
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
    variables = {"HUB_TOKEN": SECRETS["variable"], "BATON_REDIS_PASSWORD": SECRETS["variable"]}
    return ["--config", str(config)], variables


def assert_no_secret(files, done):
    texts = {**files, "standard output": done.stdout.encode(), "errors": done.stderr.encode()}
    for place, content in texts.items():
        for name, secret in SECRETS.items():
            assert secret.encode() not in content, f"{name} is in {place}"


def test_a_gateways_pages_and_no_secret(tmp_path):
    arguments, variables = plant(tmp_path)

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
        files, missing, done = await asyncio.to_thread(
            bundle, tmp_path, "--gateway", cluster.url, "--no-doctor", *arguments, **variables
        )
        assert done.returncode == 0, done.stderr
        assert_no_secret(files, done)
        for name in ("config.json", "versions.json", "logs/gateway.log"):
            assert name in files
        assert b"listening on http://127.0.0.1:8000" in files["logs/gateway.log"]
        assert json.loads(files["versions.json"])["packages"]["aiohttp"]
        metrics = files["gateway-0/metrics.txt"].decode()
        assert 'baton_gateway_requests_total{model="demo",mode="push",code="200"} 1.0' in metrics
        workers = json.loads(files["gateway-0/debug-workers.json"])["workers"]
        assert {each["state"] for each in workers} == {"up"}
        trace = json.loads(files["gateway-0/requests/000.json"])
        assert (trace["id"], trace["status"]) == ("request-1", 200)
        assert trace["gateway"]["stamps"]
        for page in ("queue", "links", "demand", "requests", "transfers"):
            assert f"gateway-0/debug-{page}.json" in files, missing
        # Scripted workers have no metrics: that is stated.
        assert "HTTP 404" in missing["gateway-0/workers/000-metrics.txt"]
        assert "doctor.json" in missing

    run(scenario)


def test_the_doctors_report_is_a_part(tmp_path):
    arguments, variables = plant(tmp_path)
    for name in ("nixl_cu12", "nixl_cu13"):  # it takes a second to start, twice
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    variables["PYTHONPATH"] = str(tmp_path)
    tier = ("--set", "store.tiers=redis")
    unreachable = ("--gateway", "http://127.0.0.1:1", "--no-logs")
    files, missing, done = bundle(tmp_path, *unreachable, *tier, *arguments, **variables)
    assert_no_secret(files, done)
    assert done.returncode == 1, "no gateway answered"
    assert "missing: gateway-0/metrics.txt: http://127.0.0.1:1/metrics" in done.stdout
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
            case "/debug/demand":
                self.send(200, b"\xff<html>")
            case "/debug/transfers":
                self.send(302, b"", location=f"http://127.0.0.1:1/{SECRETS['redirect']}")
            case "/metrics":
                self.send(200, f'up{{tenant="{SECRETS["label"]}"}} 1\n{SECRETS["page"]}\n'.encode())
            case "/debug/workers":
                url = f"http://u:{SECRETS['url user']}@127.0.0.1:1"
                self.send_json({"workers": [{"url": url, "worker": "w"}, {"url": "file:///etc/passwd"}]})
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


def test_a_gateway_that_hangs_and_lies_costs_its_pages_only(tmp_path):
    with hostile_gateway() as url:
        began = time.monotonic()
        arguments = ("--gateway", url, "--no-doctor", "--no-logs", "--timeout-s", "3")
        files, missing, done = bundle(tmp_path, *arguments)
        assert time.monotonic() - began < TIMEOUT_S / 3
    assert done.returncode == 0
    assert_no_secret(files, done)
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
    done = run_forked([*BUNDLE, *arguments], environment(tmp_path), TIMEOUT_S)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
