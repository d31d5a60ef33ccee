"""The wheel of NIXL that is installed: loaded, and its errors, and what it does to logging."""

from __future__ import annotations

import importlib
import logging
import logging.config
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import ModuleType

PACKAGES: Final = ("nixl_cu13", "nixl_cu12")
"""The same library built against two CUDA versions; neither needs CUDA for host memory. The
package `nixl`, which chooses one, would import torch (2 s) to do so."""


@cache
def load_nixl() -> ModuleType:
    """NIXL's Python module.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    reasons = []
    for package in PACKAGES:
        try:
            with _untouched_logging():
                return importlib.import_module(f"{package}._api")
        except ImportError as exc:
            reasons.append(str(exc))
    raise ConfigError(
        "the transport nixl needs NIXL: pip install 'baton-kv[nixl]', or "
        f"pip install --no-deps nixl_cu12==1.5.1 ({'; '.join(reasons)})"
    )


@contextmanager
def map_errors() -> Generator[None]:
    """Turn whatever NIXL raises into a `TransferError`.

    Its frames hold the agent, which does not end while somebody keeps the error.
    """
    try:
        yield
    except _error_types() as exc:
        raise TransferError(f"NIXL: {exc}") from exc


@cache
def _error_types() -> tuple[type[Exception], ...]:
    bindings: dict[str, Any] = vars(load_nixl().nixlBind)
    own = (
        each for each in bindings.values() if isinstance(each, type) and issubclass(each, Exception)
    )
    return (*own, RuntimeError, TypeError, ValueError)


@contextmanager
def _untouched_logging() -> Generator[None]:
    """Keep this process' logging as it is: NIXL configures all of it anew when it is imported.

    That would close every handler there is, and write NIXL's own lines to stdout.
    """
    raises, configure = logging.raiseExceptions, logging.config.dictConfig
    logging.config.dictConfig = _ignore  # type: ignore[assignment]
    try:
        yield
    finally:
        logging.raiseExceptions, logging.config.dictConfig = raises, configure


def _ignore(_: object) -> None:
    """NIXL's lines go where all others go."""
