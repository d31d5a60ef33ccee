"""`baton route`."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from baton.config.environment import read_environment
from baton.errors import ConfigError

STDIN = "-"

app = App(name="route", help="Explain where requests go, and replay traffic under other policies.")


@app.command
def explain(
    request: Annotated[
        str | None,
        Parameter(
            help="A file with the body of a completion request; - is standard input.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    *,
    url: Annotated[
        str, Parameter(help="The gateway, or its management port.")
    ] = "http://127.0.0.1:8000",
    request_id: Annotated[
        str | None, Parameter(help="Show where this request went, instead.")
    ] = None,
    api_key_env: Annotated[
        str, Parameter(help="The environment variable that holds the client's key, if any.")
    ] = "OPENAI_API_KEY",
    json: Annotated[bool, Parameter(help="Print JSON.", negative="", show_default=False)] = False,
    debug: Annotated[
        bool, Parameter(help="Show where an error arose.", negative="", show_default=False)
    ] = False,
) -> int:
    """Print every candidate for a request with its predicted parts; the request is not served.

    The gateway tokenizes the prompt, finds what its workers have cached of it, and asks its policy.
    """
    del debug  # the caller looks at the command line itself
    if (request is None) == (request_id is None):
        raise ConfigError(
            "give a file with a request's body (- is standard input), or --request-id"
        )
    # Here, so that --help imports nothing heavy.
    from baton.ops.gateway_pages import Gateway  # noqa: PLC0415
    from baton.ops.route import (  # noqa: PLC0415
        explain_request,
        find_request,
        print_explanation,
        print_request,
    )

    gateway = Gateway.at(url, "--url")
    if request_id is not None:
        placed = find_request(gateway, request_id)
        if json:
            _print_json(placed)
        else:
            print_request(placed, sys.stdout)
    elif request is not None:
        key = read_environment().get(api_key_env)
        explained = explain_request(gateway, _read_body(request), key)
        if json:
            _print_json(explained)
        else:
            print_explanation(explained, sys.stdout)
    return 0


def _read_body(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read the request {name}: {exc.strerror}") from exc


def _print_json(found: msgspec.Struct) -> None:
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
