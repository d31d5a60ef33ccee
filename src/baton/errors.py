"""Every exception this package raises on purpose.

BatonError
├── ConfigError                     the operator asked for something that cannot be built
│   ├── UnknownPluginError
│   └── InvalidLayoutError          no engine can have this KV layout
├── InvalidRequestError             the client asked for something that cannot be served
│   ├── ContextLengthError
│   └── ModelNotFoundError
├── OverloadedError                 admission was refused for want of room
├── LayoutMismatchError             two workers cannot exchange KV; names each difference
├── AuthenticationError             a peer or a ticket could not prove where it comes from
│   └── TicketError                 forged, expired, replayed, or for somebody else
├── ProtocolError                   a peer sent what the wire format does not allow
├── BlockStateError                 a block was used in a state that does not allow it: a bug
├── TransferError                   a transfer did not complete
│   ├── PeerUnreachableError
│   └── PeerLostError
├── HandoffError                    a handoff ended without its KV
├── StoreError                      a store could not keep an entry: it costs caching only
│   └── StoreFullError              there is no room for it
└── EngineError                     the engine failed a request
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no value of the type: text that is not UTF-8, nesting."""


class BatonError(Exception):
    """Base of every error raised on purpose. What may be tried again follows from its class."""


class ConfigError(BatonError):
    """The operator asked for something that cannot be built."""


class UnknownPluginError(ConfigError):
    """No plug-in of this kind is installed."""

    def __init__(self, group: str, kind: str, known: tuple[str, ...]) -> None:
        super().__init__(f"unknown {group} {kind!r}; installed: {', '.join(known) or 'none'}")
        self.group, self.kind, self.known = group, kind, known


class InvalidLayoutError(ConfigError, ValueError):
    """No engine can have this KV layout. A ValueError too, so that msgspec reports a peer's."""


class InvalidRequestError(BatonError):
    """The client asked for something that cannot be served. `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class ContextLengthError(InvalidRequestError):
    """Prompt and requested completion do not fit the model's context."""


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class OverloadedError(BatonError):
    """Admission was refused for want of room; trying again later may succeed."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LayoutMismatchError(BatonError):
    """Two workers cannot exchange KV. `differences` has one readable line for each."""

    def __init__(self, differences: tuple[str, ...]) -> None:
        super().__init__(
            f"the two workers cannot exchange KV: {'; '.join(differences)} "
            "(give both the same version of Baton, the same model and the same [engine] dtype)"
        )
        self.differences = differences


class AuthenticationError(BatonError):
    """A peer or a ticket could not prove where it comes from."""


class TicketError(AuthenticationError):
    """A ticket is forged, expired, replayed, or for somebody else."""


class ProtocolError(BatonError):
    """A peer sent what the wire format does not allow."""


class BlockStateError(BatonError):
    """A block was used in a state that does not allow it: a bug in the caller, never bad luck."""


class TransferError(BatonError):
    """A transfer did not complete."""


class PeerUnreachableError(TransferError):
    """The peer did not answer."""


class PeerLostError(TransferError):
    """The peer was there and is gone."""


class HandoffError(BatonError):
    """A handoff ended without its KV. `stage` is where, `peer` who."""

    def __init__(self, message: str, *, stage: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.stage, self.peer = stage, peer


class StoreError(BatonError):
    """A store could not keep, or look for, an entry. What is not kept is computed again."""


class StoreFullError(StoreError):
    """There is no room for an entry, and none could be made."""


class EngineError(BatonError):
    """The engine failed a request for a reason of its own."""


@contextmanager
def mapped(table: Mapping[type[Exception], type[BatonError]]) -> Generator[None]:
    """Translate foreign exceptions at a seam, keeping the cause."""
    try:
        yield
    except tuple(table) as exc:
        raise next(to for frm, to in table.items() if isinstance(exc, frm))(str(exc)) from exc
