"""`baton plan`: its flags."""

import errno
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from baton.cli.flags import ConfigFlags, RayAddress, Sets
from baton.errors import ConfigError

PRIVATE = 0o600
NOT_REPLACED = frozenset({errno.EBUSY, errno.EACCES, errno.EROFS})
"""A file that is mounted, or in a folder that cannot be written: it may still be writable."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanFlags(ConfigFlags):
    """Which fleet, on which hosts, and the KV that is expected."""

    prefill: Annotated[
        int | None, Sets("up.prefill"), Parameter(help="Number of prefill workers [default: 1].")
    ] = None
    decode: Annotated[
        int | None, Sets("up.decode"), Parameter(help="Number of decode workers [default: 1].")
    ] = None
    on: Annotated[
        Literal["ray"] | None,
        Parameter(help="Take the hosts of a Ray cluster, in place of fleet.hosts."),
    ] = None
    ray_address: RayAddress = None
    spread: Annotated[
        Literal["none", "host", "rack", "zone"] | None,
        Sets("fleet.spread"),
        Parameter(help="None of these has more than half of a role's workers [default: none]."),
    ] = None
    requests_per_s: Annotated[
        float | None, Sets("fleet.requests_per_s"), Parameter(help="Prompts a second [default: 1].")
    ] = None
    prompt_tokens: Annotated[
        int | None, Sets("fleet.prompt_tokens"), Parameter(help="Their tokens [default: 2048].")
    ] = None
    kv_model: Annotated[
        str | None,
        Parameter(
            help="Whose KV is counted: as of baton size [default: worker.model, else the demo's]."
        ),
    ] = None
    gateway: Annotated[
        str | None,
        Parameter(help="A running fleet's gateway: links as its workers have measured them."),
    ] = None
    output: Annotated[
        Path | None,
        Parameter(help="Write a configuration with the plan: baton up --on ray --config FILE."),
    ] = None
    json: Annotated[bool, Parameter(help="Print JSON.")] = False


def plan(flags: PlanFlags | None = None) -> int:
    """Assign each worker of a fleet to a host, so that KV crosses as few slow links as possible.

    Nothing is started. What workers need of a host is in [ray.workers.ROLE]; hosts are those of
    [[fleet.hosts]], or Ray's.
    """
    flags = flags or PlanFlags()
    from baton.cli.planning import (  # noqa: PLC0415 - too heavy for --help
        list_ray_hosts,
        make_plan,
        planned_settings,
    )
    from baton.planner.fleet_printing import print_plan  # noqa: PLC0415

    resolved = flags.resolve()
    config = resolved.to_config()
    hosts = config.fleet.hosts if flags.on is None else list_ray_hosts(config)
    if not hosts:
        raise ConfigError(
            "there are no hosts to plan for: name them in [[fleet.hosts]], or give --on ray"
        )
    planned = make_plan(config, hosts, kv_model=flags.kv_model, gateway=flags.gateway)
    if flags.output is not None:
        if flags.config is not None and not config.fleet.assignments:
            _check_not_source(flags.output, flags.config)
        try:
            _write_private(flags.output, planned_settings(resolved, planned))
        except OSError as exc:
            raise ConfigError(f"cannot write {flags.output}: {exc.strerror}") from exc
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(planned)).decode())
        return 0
    print_plan(planned, sys.stdout)
    if flags.output is not None:
        print(f"start it as planned: baton up --on ray --config {flags.output}")
    return 0


def _check_not_source(output: Path, source: Path) -> None:
    """Check that a configuration that has no plan yet is not replaced by one.

    Raises:
        ConfigError: it would be.
    """
    if output.exists() and output.samefile(source):
        raise ConfigError(
            f"--output {output} is the --config file: its comments and its order would be lost; "
            "name another file"
        )


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, completely or not at all where it can be replaced.

    A pipe or device is written to.
    """
    if path.exists() and not path.is_file():  # unresolved: the target of /dev/fd/3 is no path
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _fill(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE), text)
        part.replace(path)
    except OSError as exc:
        if exc.errno not in NOT_REPLACED or not path.exists():
            raise
        _fill(os.open(path, os.O_WRONLY | os.O_CLOEXEC), text)
    finally:
        with suppress(OSError):  # replaced, or never made
            part.unlink()


def _fill(fd: int, text: str) -> None:
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.fchmod(fd, PRIVATE)
        file.truncate()
        file.write(text)
