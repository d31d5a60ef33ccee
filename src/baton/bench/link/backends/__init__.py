"""Backends that are no transports: upper limits, and other projects driven as they document it.

File map:
    limits.py      memcpy, and one TCP connection, tuned and plain
    engines.py     NIXL and Mooncake
    gloo.py        PyTorch's gloo
    iperf.py       iperf3, which sends bytes of its own
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from baton.rig.node import build_transport
from baton.rig.transport import TransportBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.rig.backend import Backend, BackendContext, Build

REUSED: Final = " reused"
"""Behind a transport's kind: its transfers have been made before, and are made again."""
_FACTORIES: Final[Mapping[str, tuple[str, str]]] = {
    "memcpy": ("limits", "Memcpy"),
    "tuned socket": ("limits", "tuned_socket"),
    "socket": ("limits", "plain_socket"),
    "NIXL": ("engines", "nixl"),
    "NIXL shm": ("engines", "nixl_shm"),
    "NIXL reused": ("engines", "nixl_reused"),
    "NIXL (TCP)": ("engines", "nixl_over_tcp"),
    "Mooncake": ("engines", "Mooncake"),
    "gloo": ("gloo", "Gloo"),
    "iperf3": ("iperf", "one_stream"),
    "iperf3 -P 2": ("iperf", "two_streams"),
}
"""Module and factory of each: only what is built is imported, since some libraries are heavy."""


def build_backend(command: Build, context: BackendContext) -> Backend:
    """Build the backend that the command names; see `BuildBackend`.

    Raises:
        ConfigError: it is unknown, its library is not installed, or its options are wrong.
        TransferError: it does not work here.
    """
    if command.kind == "transport":
        kind = command.name.removesuffix(REUSED)
        if kind != command.name:
            return TransportBackend(kind, command.options, context, is_reused=True)
        return build_transport(command, context)
    if command.name not in _FACTORIES:
        raise ConfigError(f"there is nothing called {command.name!r} to measure here")
    module, factory = _FACTORIES[command.name]
    backend: Backend = getattr(import_module(f"{__name__}.{module}"), factory)(context)
    return backend
