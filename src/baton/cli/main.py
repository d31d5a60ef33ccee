"""The commands and their one-line help; errors → exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import select
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App, Parameter

from baton import __version__
from baton.cli.exit_codes import FAILED, INTERRUPTED, MISUSED
from baton.config.environment import read_environment
from baton.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def build_app() -> App:
    """The command tree. Commands are named, not imported."""
    app = App(
        name="baton",
        version=__version__,
        help="Disaggregated LLM serving: hands the KV cache from prefill to decode.",
        help_format="plaintext",
        result_action="return_value",
        default_parameter=Parameter(negative="", show_default=_show_default),
    )
    app.command(
        "baton.cli.up:up", name="up", help="Start a gateway and its workers on this machine."
    )
    for verb, text in {
        "status": "Show each process of a fleet that runs.",
        "logs": "Print what a process of a fleet wrote.",
        "scale": "Start or drain workers of a fleet.",
        "drain": "Take one worker out of a fleet.",
        "upgrade": "Replace each process of a fleet by one with the installed code.",
        "down": "Drain and end a fleet.",
    }.items():
        app.command(f"baton.cli.fleet:{verb}", name=verb, help=text)
    app.command(
        "baton.cli.autoscale:autoscale",
        name="autoscale",
        help="Size a fleet's pools by its traffic.",
    )
    app.command("baton.cli.gateway:gateway", name="gateway", help="Start a gateway.")
    app.command(
        "baton.cli.picker:picker",
        name="picker",
        help="Start an endpoint picker for the Gateway API Inference Extension.",
    )
    app.command("baton.cli.worker:worker", name="worker", help="Start one worker.")
    app.command(
        "baton.cli.doctor:doctor", name="doctor", help="Report what works here, and why not."
    )
    app.command("baton.cli.top:top", name="top", help="Show a fleet's workers and latencies, live.")
    app.command("baton.cli.debug:app", name="debug", help="Collect what an issue report needs.")
    app.command(
        "baton.cli.bench:app",
        name="bench",
        help="Measure links between workers, and servers under load.",
    )
    app.command(
        "baton.cli.plan:plan", name="plan", help="Which host each worker of a fleet starts on."
    )
    app.command(
        "baton.cli.size:size", name="size", help="How large KV is, and how long it takes to move."
    )
    app.command(
        "baton.cli.route:app",
        name="route",
        help="Explain where requests go, and replay traffic under other policies.",
    )
    app.command(
        "baton.cli.explain:explain", name="explain", help="Draw where a request's time went."
    )
    app.command("baton.cli.trace:app", name="trace", help="Write the traces of requests to a file.")
    app.command("baton.cli.sim:app", name="sim", help="Run Baton against simulated faults.")
    app.command("baton.cli.model:app", name="model", help="Make models for tests and benchmarks.")
    app.command(
        "baton.cli.key:app", name="key", help="Make, show, rotate and revoke keys and identities."
    )
    app.command(
        "baton.cli.store:app", name="store", help="Look at the store, check it, make room in it."
    )
    app.command("baton.cli.config:app", name="config", help="Look at the configuration.")
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. A wrong command line exits with 2 by itself."""
    try:
        result = build_app()(list(arguments))
        sys.stdout.flush()
    except BatonError as exc:
        if _wants_traceback(arguments):
            traceback.print_exc()
        print(f"baton: {_printable(str(exc))}", file=sys.stderr)
        return MISUSED if isinstance(exc, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not _leave_closed_output():
            raise
        return 0  # `| head` has what it wanted
    return result if isinstance(result, int) else 0


def main() -> None:
    """The `baton` program."""
    # Searching all modules for garbage on the way out takes seconds with an engine's thousands.
    atexit.register(gc.freeze)
    sys.exit(run(sys.argv[1:]))


def _leave_closed_output() -> bool:
    """Whether standard output is a pipe without a reader. What is left for it is then dropped."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


def _show_default(value: object) -> str | None:
    """What help shows of a default: of a switch that is off, and of no value, nothing."""
    return None if value is False or value in (None, (), []) else str(value)


def _printable(text: str) -> str:
    """Its lines without control characters: servers and files are quoted in it."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _wants_traceback(arguments: Sequence[str]) -> bool:
    return "--debug" in arguments or read_environment().get("BATON_LOG__LEVEL") == "debug"
