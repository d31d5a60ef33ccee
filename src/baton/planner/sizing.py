"""A model and links → how large, and how long to move."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import ConfigError
from baton.kv.sizing.config import MAX_BYTES, read_config
from baton.kv.sizing.families import read_shape
from baton.kv.sizing.sizes import Sizes, Terms, compute_sizes
from baton.models import CONFIGS_PATH, DEMO_MODEL_PATH
from baton.planner.links import NOMINAL_LINKS, MeasuredLink, transfer_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.kv.sizing.parts import ModelShape

DEMO: Final = "demo"


def shipped_names() -> tuple[str, ...]:
    """The models whose configs are here."""
    return (DEMO, *sorted(path.stem for path in CONFIGS_PATH.glob("*.json")))


def find_model(model: str) -> tuple[ModelShape, Path]:
    """What a model keeps, and the config that states it.

    Raises:
        ConfigError: there is no such model, or its config lacks something.
    """
    path = _find_config(model)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: more than {MAX_BYTES >> 20} MiB is no config.json")
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    config, way = read_config(data, str(path))
    try:
        shape = read_shape(config)
    except ConfigError as exc:
        inside = f" ({'.'.join(way)})" if way else ""
        raise ConfigError(f"{path}{inside}: {exc}") from exc
    return shape, path


def _find_config(model: str) -> Path:
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    if path.is_file():
        return path
    if model == DEMO:
        return DEMO_MODEL_PATH / "config.json"
    if model in shipped_names():
        return CONFIGS_PATH / f"{model}.json"
    known = ", ".join(shipped_names())
    raise ConfigError(f"--model {model}: no file or folder of that name, and not one of {known}")


SCHEMA: Final = "baton-size/1"


class TransferTime(msgspec.Struct, frozen=True):
    """How long one request's needed KV takes over a link, each worker by a link of its own."""

    link: str
    gb_per_s: float
    seconds: float
    is_measured: bool
    source: str


class SizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `notes`: what is not counted, or odd."""

    schema: str = SCHEMA
    model: str
    config: str
    family: str
    dtype: str
    max_context_tokens: int | None
    sizes: Sizes
    moves: tuple[TransferTime, ...]
    notes: tuple[str, ...]


def make_report(model: str, terms: Terms, measured: Sequence[MeasuredLink] = ()) -> SizeReport:
    """Sizes of one request of a model, and its times on nominal and measured links.

    Raises:
        ConfigError: the model is not known, or the terms do not fit it.
    """
    shape, path = find_model(model)
    sizes = compute_sizes(shape, terms)
    num_bytes = sizes.rank_needed_bytes
    nominal = [
        TransferTime(
            link.name,
            link.gb_per_s,
            transfer_s(num_bytes, link.gb_per_s),
            is_measured=False,
            source=link.source,
        )
        for link in NOMINAL_LINKS
    ]
    own = [
        TransferTime(
            each.name,
            each.gb_per_s,
            transfer_s(num_bytes, each.gb_per_s, each.latency_s),
            is_measured=True,
            source=each.source,
        )
        for each in measured
    ]
    notes = list(shape.notes)
    if shape.max_context_tokens is not None and terms.num_tokens > shape.max_context_tokens:
        notes.append(f"the model's context holds {shape.max_context_tokens:,} tokens only")
    if sizes.state_bytes:
        notes.append(
            "layers with a state keep one of a fixed size; engines that cache prefixes keep "
            "further copies of it"
        )
    return SizeReport(
        model=model,
        config=str(path),
        family=shape.family,
        dtype=shape.dtype,
        max_context_tokens=shape.max_context_tokens,
        sizes=sizes,
        moves=tuple(sorted((*nominal, *own), key=lambda each: -each.seconds)),
        notes=tuple(notes),
    )
