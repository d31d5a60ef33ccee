"""`baton config show`: each value and where it came from."""

from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from baton.cli.flags import ConfigFlags
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import read_environment
from baton.config.resolve import Resolved, describe
from baton.errors import UnknownPluginError

app = App(name="config", help="Look at the configuration.")

HIDDEN = "(hidden)"


class ShownValue(msgspec.Struct, frozen=True):
    """One key's row; what `--json` prints for it."""

    value: object
    origin: str


@app.command
def show(
    flags: ConfigFlags | None = None,
    *,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
) -> int:
    """Print each setting, and where it came from: default, file, environment or flag."""
    rows = _rows((flags or ConfigFlags()).resolve())
    if json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        _print_table(rows)
    return 0


def _rows(resolved: Resolved) -> dict[str, ShownValue]:
    rows = _engine_rows(resolved.to_config().worker.engine)
    for name, value in resolved.values.items():
        rows[name] = ShownValue(value.value, describe(value.origin))
    if read_environment().get(KEY_VARIABLE):  # an empty one is none
        rows["cluster.key"] = ShownValue(HIDDEN, f"environment {KEY_VARIABLE}")
    return dict(sorted(rows.items()))


def _engine_rows(kind: str) -> dict[str, ShownValue]:
    from baton.cli.engine_options import engine_defaults  # noqa: PLC0415 - too heavy for --help

    try:
        defaults = engine_defaults(kind)
    except UnknownPluginError:  # its settings can be shown; what it would take by default cannot
        return {}
    return {f"engine.{key}": ShownValue(value, "default") for key, value in defaults.items()}


def _print_table(rows: dict[str, ShownValue]) -> None:
    from rich.console import Console  # noqa: PLC0415 - too heavy for --help
    from rich.table import Table  # noqa: PLC0415

    table = Table("setting", "value", "from", box=None, pad_edge=False, header_style="bold")
    for name, row in rows.items():
        table.add_row(name, msgspec.json.encode(row.value).decode(), row.origin)
    Console(markup=False, highlight=False, soft_wrap=True).print(table)
