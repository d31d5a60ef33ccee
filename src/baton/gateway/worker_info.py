"""What a worker says about itself (docs/wire/worker-http.md), checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.authority.ticket import WorkerRef
from baton.errors import ProtocolError
from baton.ids import Epoch, WorkerId
from baton.router.fleet import Role, WorkerView

if TYPE_CHECKING:
    from baton.gateway.options import WorkerAddress

MAX_INFO_BYTES: Final = 1 << 20
_MAX_NAME_CHARS: Final = 256
_EPOCH_CHARS: Final = 32


class WorkerInfo(msgspec.Struct, frozen=True):
    """The part of a worker's self-description that placement and tickets need."""

    worker: WorkerId
    epoch: Epoch
    role: Role
    served_model_name: str
    fingerprint: str
    max_context_tokens: int
    handoff_address: str
    transports: tuple[str, ...]
    version: str

    def view(self, listed_role: Role, *, available: bool) -> WorkerView:
        """What placement sees of this worker in the role that the operator gave it."""
        return WorkerView(
            ref=WorkerRef(self.worker, self.epoch, self.handoff_address),
            role=listed_role,
            model=self.served_model_name,
            fingerprint=self.fingerprint,
            transports=frozenset(self.transports),
            available=available,
        )


_decoder = msgspec.json.Decoder(WorkerInfo)


def read_info(body: bytes) -> WorkerInfo:
    """Decode and bounds-check.

    Raises:
        ProtocolError: not what the wire format allows.
    """
    try:
        info = _decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"the worker's description does not decode: {exc}") from exc
    for name in ("worker", "served_model_name", "fingerprint", "handoff_address", "version"):
        if not 0 < len(getattr(info, name)) <= _MAX_NAME_CHARS:
            raise ProtocolError(f"the worker's {name} is empty or too long")
    if len(info.epoch) != _EPOCH_CHARS:
        raise ProtocolError(f"the worker's epoch has {len(info.epoch)} characters, not 32")
    return info


def why_not_used(info: WorkerInfo, listed: WorkerAddress) -> str | None:
    """Why a worker cannot be used as the operator listed it; None if it can."""
    if info.role in {listed.role, Role.BOTH}:
        return None
    return (
        f"it was listed as a {listed.role} worker but was started with the role {info.role}; "
        f"list it as {_option(info.role)}, or start it with the role {listed.role}"
    )


def _option(role: Role) -> str:
    return "--worker" if role is Role.BOTH else f"--{role}"
