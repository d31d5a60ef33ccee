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
import secrets
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec

from baton.errors import UNDECODABLE, ConfigError
from baton.net.daemon_thread import begin_call
from baton.router.learning import MOST_BEND, LearnedLine, PromptLine
from baton.router.topology import Distance

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

    from baton.router.load import FleetLoad

INTERVAL_S: Final = 10.0
LEAST_SEEN: Final = 8
"""Observations from which a line is worth keeping."""
MAX_BYTES: Final = 1 << 20
END_TIMEOUT_S: Final = 5.0

log = logging.getLogger(__name__)
Result = TypeVar("Result")
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
    kept = await _call(partial(_read, path))
    _guess(kept, load)
    ends = asyncio.Event()
    task = asyncio.create_task(_follow(path, load, kept, ends))
    try:
        yield
    finally:
        ends.set()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await task
        except TimeoutError:
            log.warning(
                "cannot keep the learned costs in %s: no answer in %g s", path, END_TIMEOUT_S
            )


async def _follow(
    path: Path, load: FleetLoad, kept: dict[str, KeptCosts], ends: asyncio.Event
) -> None:
    """Until `ends` is set, and once then.

    On threads, since the file may be on another host: one at a time, even if it hangs.
    """
    is_last = False
    while not is_last:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S):
                await ends.wait()
        is_last = ends.is_set()
        try:
            found = await _call(partial(_read, path))
        except OSError as exc:  # there are no more threads
            log.warning("cannot read or keep the learned costs in %s now: %s", path, exc)
            continue
        except ConfigError as exc:
            log.warning("%s; it is replaced by what this gateway has learned", exc)
        else:  # of other gateways, too
            kept.update(found)
            _guess(found, load)
        _learn(load, kept)
        if kept:
            with contextlib.suppress(OSError):  # no more threads: the next time
                await _call(partial(_write, path, KeptFile(dict(kept))))


async def _call(function: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(begin_call("learned-costs", function))


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


def _learn(load: FleetLoad, kept: dict[str, KeptCosts]) -> None:
    for model, costs in load.models.items():
        before = kept.get(model, KeptCosts())
        kept[model] = KeptCosts(
            _keep_prompts(costs.prefill) or before.prefill,
            _keep(costs.step) or before.step,
            _keep(costs.load) or before.load,
            before.handoff | _keep_handoffs(costs.handoffs.lines),
        )


def _write(path: Path, file: KeptFile) -> None:
    """Some hundred bytes for each model."""
    content = msgspec.json.format(msgspec.json.encode(file))
    # Several gateways may write it at once: those of containers have the same process id.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists() and path.read_bytes() == content:
            return
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as exc:
        log.warning("cannot keep the learned costs in %s: %s", path, exc.strerror)
        unfinished.unlink(missing_ok=True)


def _keep(line: LearnedLine) -> KeptLine | None:
    return KeptLine(line.fixed, line.each) if line.num_seen >= LEAST_SEEN else None


def _keep_prompts(line: PromptLine) -> KeptPromptLine | None:
    kept = _keep(line)
    return None if kept is None else KeptPromptLine(kept.fixed_s, kept.each_s, line.bend)


def _keep_handoffs(lines: Sequence[LearnedLine]) -> dict[DistanceName, KeptLine]:
    kept = zip(get_args(DistanceName), map(_keep, lines), strict=True)
    return {distance: line for distance, line in kept if line is not None}


def _read(path: Path) -> dict[str, KeptCosts]:
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"router.costs_file: there is no directory {path.parent}")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"router.costs_file: {path} has more than {MAX_BYTES} bytes")
        content = path.read_bytes()
        if not content.strip(b"\0"):
            return {}  # as the crash of a machine may leave a file that was just replaced
        return msgspec.json.decode(content, type=KeptFile).models
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise ConfigError(f"router.costs_file: cannot read {path}: {exc.strerror}") from exc
    except UNDECODABLE as exc:
        raise ConfigError(
            f"router.costs_file: {path} has no learned costs ({exc}); remove it, or name another"
        ) from exc
