"""`baton trace`."""

from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from baton.errors import ConfigError

SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
MOST: Final = 1000

app = App(name="trace", help="Write the traces of requests to a file.")


@app.command
def export(
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"), help="The file to write.")],
    gateway: Annotated[
        str, Parameter(help="The gateway, or its management port.")
    ] = "http://127.0.0.1:8000",
    last: Annotated[
        str, Parameter(help="Requests that ended so long ago at most: 60s, 5m or 1h.")
    ] = "60s",
    only: Annotated[
        Literal["slow", "failed"] | None,
        Parameter(help="Only those that the gateway keeps longer for that."),
    ] = None,
    most: Annotated[int, Parameter(help="At most so many requests, the latest.")] = MOST,
    debug: Annotated[bool, Parameter(help="Show where an error arose.")] = False,
) -> int:
    """Write a window of requests in Chrome's trace event format.

    Open the file at https://ui.perfetto.dev (it stays in the browser), or in chrome://tracing.
    """
    del debug  # the caller looks at the command line itself
    last_s = _read_duration(last)
    if most < 1:
        raise ConfigError("--most: a number above 0")
    # Here, so that --help imports nothing heavy.
    import msgspec  # noqa: PLC0415

    from baton.ops.gateway_pages import Gateway  # noqa: PLC0415
    from baton.ops.perfetto import make_trace_file  # noqa: PLC0415
    from baton.ops.request_traces import fetch_traces  # noqa: PLC0415

    traces = list(fetch_traces(Gateway.at(gateway, "--gateway"), last_s, most, only))
    try:
        output.write_bytes(msgspec.json.encode(make_trace_file(traces)))
    except OSError as exc:
        raise ConfigError(f"cannot write {output}: {exc.strerror}") from exc
    print(f"{len(traces)} requests written to {output}; open it at https://ui.perfetto.dev")
    return 0


def _read_duration(text: str) -> float:
    number, unit = (text[:-1], SECONDS[text[-1]]) if text[-1:] in SECONDS else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--last {text!r}: give a time such as 60s, 5m or 1h")
    return seconds
