"""Costs of simulated workers: from a file, from settings, or as a gateway has learned them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

import msgspec

from baton.errors import UNDECODABLE, ConfigError
from baton.gateway.learned_costs import DistanceName, KeptCosts, KeptFile, KeptPromptLine
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
    """Costs of a file, then `name=value`. See `baton route replay --costs`.

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
        if "models" in found:
            return _describe(path, _only_model(path, msgspec.convert(found, KeptFile)))
        if "workers" in found:
            shown = msgspec.convert(found, ShownWorkers)
            return _describe(path, _mean_costs(shown)) | _mean_room(shown)
    except UNDECODABLE as exc:
        raise ConfigError(f"--costs {path}: {exc}") from exc
    return found


def _only_model(path: Path, kept: KeptFile) -> KeptCosts:
    if len(kept.models) != 1:
        named = ", ".join(sorted(kept.models)) or "no model"
        raise ConfigError(f"--costs {path}: name a file with the costs of one model, not {named}")
    return next(iter(kept.models.values()))


def _mean_costs(shown: ShownWorkers) -> KeptCosts:
    """The workers' mean lines, of which something was seen."""
    given = [each.given for each in shown.workers if each.given is not None]
    return KeptCosts(
        _mean_line([each.prefill for each in given]),
        _mean_line([each.step for each in given]),
        _mean_line([each.load for each in given if each.load is not None]),
    )


def _mean_line(lines: Sequence[Line]) -> KeptPromptLine | None:
    seen = [each for each in lines if each.num_seen]
    if not seen:
        return None
    fixed_s, each_s = _mean([each.fixed_s for each in seen]), _mean([each.each_s for each in seen])
    bent_s = _mean([each.each_s * each.bend for each in seen])
    return KeptPromptLine(fixed_s, each_s, bent_s / each_s if each_s else 0.0)


def _mean_room(shown: ShownWorkers) -> dict[str, object]:
    rooms = [each.load for each in shown.workers if each.load is not None]
    kv_tokens = [each.num_blocks * each.block_size for each in rooms]
    return {"kv_tokens": round(_mean(kv_tokens))} if kv_tokens else {}


def _describe(path: Path, costs: KeptCosts) -> dict[str, object]:
    """As `SimulatedCosts`, with the handoffs of the shortest distance that is known."""
    prefill, step, load = costs.prefill, costs.step, costs.load
    if prefill is None or step is None:
        raise ConfigError(
            f"--costs {path}: prefill or steps are not learned yet (streamed answers teach them)"
        )
    found: dict[str, object] = {
        "prefill_s": prefill.fixed_s,
        "prefill_token_s": max(1e-9, prefill.each_s),
        "prefill_context_s": prefill.each_s * prefill.bend,
        "step_s": max(1e-6, step.fixed_s),
        "step_answer_s": step.each_s,
    }
    if load is not None:
        found |= {"load_s": load.fixed_s, "load_token_s": load.each_s}
    handoff = next(filter(None, map(costs.handoff.get, get_args(DistanceName))), None)
    if handoff is not None:
        found |= {"handoff_s": handoff.fixed_s, "handoff_token_s": handoff.each_s}
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
