"""One `nixl_agent` with a UCX backend, typed: all that Baton uses of NIXL."""

from __future__ import annotations

import ctypes
import importlib
import logging
import logging.config
import os
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast
from weakref import WeakSet

from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import ModuleType

    import numpy as np
    from numpy.typing import NDArray

PACKAGES: Final = ("nixl_cu13", "nixl_cu12")
"""The same library built against two CUDA versions; neither needs CUDA for host memory. The
package `nixl`, which chooses one, would import torch (2 s) to do so."""


SYSTEM_LIBNL: Final = "libnl-route-3.so.200"


@cache
def load_nixl() -> ModuleType:
    """NIXL's Python module.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    _bind_system_libnl()
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


def _bind_system_libnl() -> None:
    """Load the system's libnl, if there is one, before UCX makes the wheel's own visible to all.

    The system's RDMA drivers (Debian: `ibverbs-providers`) use the system's. Loaded later, it calls
    functions of the wheel's, which refuses its traffic classes as duplicates, and ends the process
    by SIGSEGV at exit, when they are taken out of lists that they are not in (NIXL 1.5.1).
    """
    with suppress(OSError):
        ctypes.CDLL(SYSTEM_LIBNL)  # ctypes binds all symbols at once, and keeps it loaded


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


AgentName: TypeAlias = str | bytes
Operation: TypeAlias = Literal["WRITE", "READ"]
HERE: Final = "NIXL_INIT_AGENT"
"""What NIXL calls this side of a transfer."""

_MEMORY: Final = "DRAM"


class Handle(Protocol):
    """A descriptor list, or a transfer, that NIXL keeps until it is given back."""

    def release(self) -> None:
        """Give it back."""
        ...


class Selection(NamedTuple):
    """Items of a prepared list, int32 `[n]`."""

    prepared: Handle
    items: NDArray[np.int32]


class Agent:
    """Raises `TransferError` for whatever NIXL raises. It ends with the last reference to it.

    It has no progress thread, which would take a core for itself: only its own calls move bytes.
    """

    def __init__(self, name: str, parameters: Mapping[str, str]) -> None:
        nixl = load_nixl()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        with map_errors():
            self._nixl: Any = nixl.nixl_agent(name, config)
            self._nixl.create_backend("UCX", dict(parameters))
        _agents.add(self)

    def abandon(self) -> None:
        """Never end: in a forked child, whose copy of UCX would tear down the parent's sockets."""
        for each in (self._nixl, self._nixl.agent):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory of this process usable."""
        with map_errors():
            self._nixl.register_memory([(address, num_bytes, 0, "")], _MEMORY)

    def describe(self) -> bytes:
        """What another agent must know to reach what is registered here by now."""
        with map_errors():
            return cast("bytes", self._nixl.get_agent_metadata())

    def load_metadata(self, description: bytes) -> AgentName:
        """Take another agent's description; the name that it gives itself."""
        with map_errors():
            return cast("AgentName", self._nixl.add_remote_agent(description))

    def prepare(self, owner: AgentName, rows: NDArray[np.uint64]) -> Handle:
        """A list of strided rows, uint64 `[s, 5]`, in the owner's registered memory."""
        with map_errors():
            return cast("Handle", self._nixl.prep_xfer_dlist(owner, rows, _MEMORY))

    def choose(self, operation: Operation, ours: Selection, theirs: Selection) -> Handle:
        """A transfer between items of prepared lists. NIXL joins what is adjacent on both sides."""
        with map_errors():
            return cast("Handle", self._nixl.make_prepped_xfer(operation, *ours, *theirs))

    def spell_out(
        self,
        operation: Operation,
        ours: NDArray[np.uint64],
        theirs: NDArray[np.uint64],
        peer: AgentName,
    ) -> Handle:
        """A transfer between rows, uint64 `[n, 3]`."""
        with map_errors():
            descs = (self._nixl.get_xfer_descs(rows, _MEMORY) for rows in (ours, theirs))
            return cast("Handle", self._nixl.initialize_xfer(operation, *descs, peer))

    def start(self, transfer: Handle) -> None:
        """Post a transfer."""
        with map_errors():
            self._nixl.transfer(transfer)

    def is_done(self, transfer: Handle) -> bool:
        """Whether a posted transfer is in place at its destination; makes progress."""
        with map_errors():
            state = self._nixl.check_xfer_state(transfer)
        match state:
            case "DONE":
                return True
            case "PROC":
                return False
            case _:
                raise TransferError("NIXL: a transfer failed")

    def drive(self) -> None:
        """Make progress; it does so when asked for notifications, of which there are none."""
        with map_errors():
            self._nixl.get_new_notifs()


_agents: Final[WeakSet[Agent]] = WeakSet()


def _abandon_agents() -> None:
    for agent in _agents:
        agent.abandon()


os.register_at_fork(after_in_child=_abandon_agents)
