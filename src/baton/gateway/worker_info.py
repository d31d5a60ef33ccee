"""What a worker says about itself (docs/wire/worker-http.md), checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.authority.ticket import WorkerRef
from baton.errors import ProtocolError
from baton.ids import Epoch, WorkerId
from baton.router.fleet import Role, WorkerView

if TYPE_CHECKING:
    from baton.gateway.options import WorkerAddress

EPOCH_CHARS: Final = 32
NAME: Final = msgspec.Meta(min_length=1, max_length=256)


class WorkerInfo(msgspec.Struct, frozen=True):
    """The part of a worker's self-description that placement and tickets need."""

    worker: Annotated[WorkerId, NAME]
    epoch: Annotated[Epoch, msgspec.Meta(min_length=EPOCH_CHARS, max_length=EPOCH_CHARS)]
    role: Role
    served_model_name: Annotated[str, NAME]
    fingerprint: Annotated[str, NAME]
    max_context_tokens: Annotated[int, msgspec.Meta(gt=0)]
    handoff_address: Annotated[str, NAME]
    transports: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]
    version: Annotated[str, NAME]

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
        return _decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"its /baton/v1/info does not decode: {exc}") from exc


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
