"""Requests that no client should send, and what `/openapi.json` says that it may."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PATHS: Final = ("/v1/completions", "/v1/chat/completions")
JSON: Final = "application/json"
TIMEOUT_S: Final = 60
HUGE: Final = "9" * 5000
DEEP: Final = 100_000

ALWAYS_SENT: Final = ("model", "max_tokens", "stream", "n")
"""Fields of chats that `explore` never leaves out."""

_VALUES: Final[Mapping[str, str]] = {
    "NaN": "NaN",
    "a huge number": HUGE,
    "a number that is infinite": "1e999",
    "a negative number": "-9223372036854775809",
    "text": '"text"',
    "half of a surrogate pair": '"\\ud800"',
    "a list": "[]",
    "an object": "{}",
    "a list in a list": "[[[]]]",
    "deep": "[" * DEEP + "]" * DEEP,
    "true": "true",
}
_FIELDS: Final = (
    "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "stream", "stop",
    "seed", "logprobs", "stream_options", "cache_salt", "kv_transfer_params", "vllm_xargs",
)  # fmt: skip
_RAW: Final[Mapping[str, bytes]] = {
    "nothing": b"",
    "no JSON": b"model=demo",
    "cut off": b'{"model":"demo","prompt":"a',
    "a list": b"[]",
    "a string": b'"demo"',
    "null": b"null",
    "two objects": b"{}{}",
    "no UTF-8": b'{"model":"demo","prompt":"\xff\xfe","messages":[]}',
    "a byte order mark": b'\xef\xbb\xbf{"model":"demo"}',
    "UTF-16": '{"model":"demo"}'.encode("utf-16"),
    "deep lists": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "no fields": b"{}",
    "no prompt": b'{"model":"demo"}',
    "no messages": b'{"model":"demo","messages":[]}',
    "a message that is none": b'{"model":"demo","messages":[7]}',
    "a message without role": b'{"model":"demo","messages":[{"content":"a"}]}',
    "negative ids": b'{"model":"demo","prompt":[-1]}',
    "huge ids": b'{"model":"demo","prompt":[2147483648]}',
    "ids and text": b'{"model":"demo","prompt":[1,"a"]}',
}


def make_bodies(path: str) -> dict[str, bytes]:
    """Bodies that are wrong, each by its name; some are right for one engine."""
    prompt = '"prompt":"a"' if path == PATHS[0] else '"messages":[{"role":"user","content":"a"}]'
    bodies = dict(_RAW)
    for field in _FIELDS:
        for name, value in _VALUES.items():
            rest = f'"model":"demo",{prompt},"max_tokens":1'
            bodies[f"{field}: {name}"] = f'{{{rest},"{field}":{value}}}'.encode()
    return bodies


def send(url: str, body: bytes, content_type: str = JSON) -> tuple[int, str, bytes]:
    """Status, content type and body of an answer."""
    request = urllib.request.Request(url, body, {"content-type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, response.headers["content-type"], response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read()


def check_answer(url: str, name: str, body: bytes, content_type: str = JSON) -> int:
    """Whatever was sent: an answer, or an error of the client's in OpenAI's form; the status."""
    status, answered_type, raw = send(url, body, content_type)
    shown = f"{name}: {status} {raw[:500]!r}"
    assert status == 200 or 400 <= status < 500, shown
    if status != 200:
        assert answered_type == JSON, shown
        error = json.loads(raw).get("error")
        assert error, shown
        assert error["message"], shown
        assert error["type"], shown
    return status


def check_bad_requests(gateway_url: str) -> None:
    """None of them is a server's error, most are a client's, and afterwards all is well."""
    for path in PATHS:
        url = gateway_url + path
        statuses = {name: check_answer(url, name, body) for name, body in make_bodies(path).items()}
        assert all(statuses[name] == 400 for name in _RAW), statuses
        num_bad = sum(status == 400 for status in statuses.values())
        assert num_bad > len(statuses) * 0.6, statuses
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/x"):
            assert check_answer(url, content_type, b"{}", content_type) == 415
    good = b'{"model":"demo","prompt":"a","max_tokens":1}'
    assert check_answer(gateway_url + PATHS[0], "good", good) == 200


def explore(
    gateway_url: str,
    directory: Path,
    *changes: str,
    model: dict[str, Any],
    required: tuple[str, ...] = (),
    is_whole: bool = True,
) -> None:
    """Let schemathesis send what the gateway's own description allows, and what it does not.

    Not checked: that all that is allowed is accepted. A schema says nothing of what an engine
    has, nor of a context's length. `model` is changed in the properties of both requests, so that
    most requests reach a worker; they have these `required` fields besides. Unless `is_whole`, of
    the 37 fields that both describe alike, and one class reads for both, completions alone get all.
    """
    with urllib.request.urlopen(f"{gateway_url}/openapi.json", timeout=TIMEOUT_S) as response:
        document = json.load(response)
    schemas = document["components"]["schemas"]
    for request in ("ChatCompletionRequest", "CompletionRequest"):
        schemas[request]["properties"].update(model)
        schemas[request]["required"] = [*schemas[request].get("required", ()), *required]
    if not is_whole:
        chat = schemas["ChatCompletionRequest"]["properties"]
        others = schemas["CompletionRequest"]["properties"]
        for name in [n for n in chat if chat[n] == others.get(n) and n not in ALWAYS_SENT]:
            del chat[name]
    schemas["ChatMessage"]["required"] = ["role", "content"]
    schemas["ChatMessage"]["properties"]["content"] = {"type": "string"}
    # Templates refuse others: none would reach a worker.
    schemas["ChatMessage"]["properties"]["role"] = {"enum": ["system", "user", "assistant"]}
    for described in document["paths"].values():  # it takes headers that are not listed for wrong
        described.get("post", {}).pop("parameters", None)
    file = directory / "openapi.json"
    file.write_text(json.dumps(document))
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", gateway_url,
        "--seed", "1", "--generation-deterministic", "--no-color", "--continue-on-failure",
        "--output-sanitize", "false", "--request-timeout", str(TIMEOUT_S),
        *changes,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=directory
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Tested: " in done.stdout
