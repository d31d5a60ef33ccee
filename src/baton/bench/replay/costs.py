"""Costs of simulated workers: from a file, from settings, or as a gateway has learned them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE, ConfigError
from baton.sim.router.costs import SimulatedCosts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_FILE_BYTES: Final = 16 << 20


class Line(msgspec.Struct, frozen=True):
    """What is read of a learned cost in `/debug/workers`: `fixed_s + each_s * size`.

    `bend`: what each token before it adds to a token of a prompt, as a share of `each_s`.
    """

    fixed_s: float
    each_s: float
    num_seen: int
    bend: float = 0.0


class Given(msgspec.Struct, frozen=True):
    """What is read of a worker's costs."""

    prefill: Line
    step: Line
    load: Line | None = None


class Room(msgspec.Struct, frozen=True):
    """What is read of the load that a worker reports."""

    num_blocks: int
    block_size: int


class ShownWorker(msgspec.Struct, frozen=True):
    """What is read of a worker."""

    given: Given | None = None
    load: Room | None = None


class ShownWorkers(msgspec.Struct, frozen=True):
    """What is read of `/debug/workers`."""

    workers: tuple[ShownWorker, ...]


def read_costs(
    path: Path | None, assignments: Sequence[str], block_tokens: int | None
) -> SimulatedCosts:
    """Costs of a TOML or JSON file, or of a file with `/debug/workers`; then `name=value`.

    `block_tokens` is the size of blocks where nothing else is given.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong.
    """
    found: dict[str, object] = {} if block_tokens is None else {"block_size": block_tokens}
    if path is not None:
        found |= _read(path)
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        try:
            found[name.strip()] = msgspec.json.decode(value.strip())
        except UNDECODABLE as exc:
            raise ConfigError(f"--cost {assignment}: write NAME=NUMBER") from exc
    try:
        costs = msgspec.convert(found, SimulatedCosts)
    except msgspec.ValidationError as exc:
        names = ", ".join(field.name for field in msgspec.structs.fields(SimulatedCosts))
        raise ConfigError(f"costs of workers: {exc} (there are {names})") from exc
    if not costs.num_blocks:
        raise ConfigError("costs of workers: kv_tokens is less than block_size")
    return costs


def _read(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--costs {path}: more than {MAX_FILE_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"--costs {path}: {exc.strerror}") from exc
    try:
        if path.suffix == ".toml":
            return msgspec.toml.decode(data, type=dict[str, object])
        found = msgspec.json.decode(data, type=dict[str, object])
        if "workers" in found:
            return _learned(path, msgspec.convert(found, ShownWorkers))
    except UNDECODABLE as exc:
        raise ConfigError(f"--costs {path}: {exc}") from exc
    return found


def _learned(path: Path, shown: ShownWorkers) -> dict[str, object]:
    """The workers' mean lines, of which something was seen."""
    given = [each.given for each in shown.workers if each.given is not None]
    prefill = [each.prefill for each in given if each.prefill.num_seen]
    step = [each.step for each in given if each.step.num_seen]
    load = [each.load for each in given if each.load is not None and each.load.num_seen]
    rooms = [each.load for each in shown.workers if each.load is not None]
    kv_tokens = [each.num_blocks * each.block_size for each in rooms]
    if not prefill or not step:
        raise ConfigError(
            f"--costs {path}: that gateway has learned nothing yet (streamed answers teach it)"
        )
    found: dict[str, object] = {
        "prefill_s": _mean([each.fixed_s for each in prefill]),
        "prefill_token_s": max(1e-9, _mean([each.each_s for each in prefill])),
        "prefill_context_s": _mean([each.each_s * each.bend for each in prefill]),
        "step_s": max(1e-6, _mean([each.fixed_s for each in step])),
        "step_answer_s": _mean([each.each_s for each in step]),
    }
    if kv_tokens:
        found["kv_tokens"] = round(_mean(kv_tokens))
    if load:
        found["load_s"] = _mean([each.fixed_s for each in load])
        found["load_token_s"] = _mean([each.each_s for each in load])
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
