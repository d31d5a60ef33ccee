"""What a gateway has learned of its workers' speed, kept in a file: the next one begins with it.

What workers of a model share is kept, not what one of them is slower by: that may be another
machine by then. It is a first guess: what is seen of requests takes over. The file is read again
while the gateway runs: a gateway that it replaces writes once more when it ends, and others may
serve other models. What is in it is a guess for lines of which nothing was seen here, and stays in
the file where little was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, get_args

import msgspec

from baton.errors import UNDECODABLE, ConfigError
from baton.router.learning import MOST_BEND, LearnedLine, PromptLine
from baton.router.topology import Distance

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from baton.router.load import FleetLoad

INTERVAL_S: Final = 10.0
LEAST_SEEN: Final = 8
"""Observations from which a line is worth keeping."""
MAX_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e4)]


DistanceName: TypeAlias = Literal[
    "same_device", "same_host", "same_rack", "same_zone", "cross_zone"
]


class KeptLine(msgspec.Struct, frozen=True):
    """`fixed_s`, and `each_s` for each token that is moved or computed, or answer of a step."""

    fixed_s: _Seconds
    each_s: _Seconds


class KeptPromptLine(KeptLine, frozen=True, omit_defaults=True):
    """`bend`: what each token before it adds to a token, as a share of `each_s`."""

    bend: Annotated[float, msgspec.Meta(ge=0, le=MOST_BEND)] = 0.0


class KeptCosts(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model's; None: too little was seen. `handoff`: the exposed part, by distance."""

    prefill: KeptPromptLine | None = None
    step: KeptLine | None = None
    load: KeptLine | None = None
    handoff: dict[DistanceName, KeptLine] = {}


class KeptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: JSON, by the names of models."""

    models: Annotated[dict[str, KeptCosts], msgspec.Meta(max_length=4096)]


@contextlib.asynccontextmanager
async def keep_costs(path: Path | None, load: FleetLoad) -> AsyncGenerator[None]:
    """Begin with what the file has; within, it follows what is learned. None: nothing is kept.

    Raises:
        ConfigError: the file cannot be read, or is none.
    """
    if path is None:
        yield
        return
    kept = _read(path)
    _guess(kept, load)
    task = asyncio.create_task(_follow(path, load, kept))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        _read_again(path, load, kept)
        _write(path, load, kept)


async def _follow(path: Path, load: FleetLoad, kept: dict[str, KeptCosts]) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        _read_again(path, load, kept)
        _write(path, load, kept)


def _guess(kept: dict[str, KeptCosts], load: FleetLoad) -> None:
    for model, costs in kept.items():
        known = load.costs(model)
        lines = ((known.prefill, costs.prefill), (known.step, costs.step), (known.load, costs.load))
        for line, guess in lines:
            if guess is not None and (guess.fixed_s or guess.each_s):
                line.guess_again((guess.fixed_s, guess.each_s))
        if costs.prefill is not None and not known.prefill.num_seen:
            known.prefill.bend = costs.prefill.bend
        known.handoffs.begin_with({
            Distance[name.upper()]: (line.fixed_s, line.each_s)
            for name, line in costs.handoff.items()
        })


def _read_again(path: Path, load: FleetLoad, kept: dict[str, KeptCosts]) -> None:
    """Take what other gateways have written; a file that cannot be read is written anew."""
    try:
        found = _read(path)
    except ConfigError as exc:
        log.warning("%s; it is replaced by what this gateway has learned", exc)
        return
    kept.update(found)
    _guess(found, load)


def _write(path: Path, load: FleetLoad, kept: dict[str, KeptCosts]) -> None:
    """Some hundred bytes for each model."""
    for model, costs in load.models.items():
        before = kept.get(model, KeptCosts())
        kept[model] = KeptCosts(
            _keep_prompts(costs.prefill) or before.prefill,
            _keep(costs.step) or before.step,
            _keep(costs.load) or before.load,
            before.handoff | _keep_handoffs(costs.handoffs.lines),
        )
    content = msgspec.json.format(msgspec.json.encode(KeptFile(kept)))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")  # several gateways may write it
    try:
        if not kept or (path.exists() and path.read_bytes() == content):
            return
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as exc:
        log.warning("cannot keep the learned costs in %s: %s", path, exc.strerror)


def _keep(line: LearnedLine) -> KeptLine | None:
    return KeptLine(line.fixed, line.each) if line.num_seen >= LEAST_SEEN else None


def _keep_prompts(line: PromptLine) -> KeptPromptLine | None:
    kept = _keep(line)
    return None if kept is None else KeptPromptLine(kept.fixed_s, kept.each_s, line.bend)


def _keep_handoffs(lines: Sequence[LearnedLine]) -> dict[DistanceName, KeptLine]:
    kept = zip(get_args(DistanceName), map(_keep, lines), strict=True)
    return {distance: line for distance, line in kept if line is not None}


def _read(path: Path) -> dict[str, KeptCosts]:
    if not path.parent.is_dir():
        raise ConfigError(f"router.costs_file: there is no directory {path.parent}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"router.costs_file: {path} has more than {MAX_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=KeptFile).models
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise ConfigError(f"router.costs_file: cannot read {path}: {exc.strerror}") from exc
    except UNDECODABLE as exc:
        raise ConfigError(
            f"router.costs_file: {path} has no learned costs ({exc}); remove it, or name another"
        ) from exc
