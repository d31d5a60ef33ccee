"""Which model is meant: a name that ships, a config.json, or a folder with one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from baton.kv.sizing.config import MAX_BYTES, read_config
from baton.kv.sizing.families import read_shape
from baton.models import CONFIGS_PATH, DEMO_MODEL_PATH

if TYPE_CHECKING:
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
