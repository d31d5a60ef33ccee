"""What a worker says about itself (docs/wire/worker-http.md), checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, get_args

import msgspec
from yarl import URL

from baton.auth.ticket import HandoffMode, WorkerRef
from baton.config.cluster_key import is_loopback
from baton.errors import ProtocolError
from baton.ids import Epoch, WorkerId
from baton.router.fleet import Role, WorkerLoad, WorkerProtocol, WorkerView

if TYPE_CHECKING:
    from baton.gateway.options import WorkerAddress

EPOCH_CHARS: Final = 32
MAX_RANKS: Final = 32
"""Of tensor parallelism: above it, the addresses of all ranks would not fit into a ticket."""

NAME: Final = msgspec.Meta(min_length=1, max_length=256)
Name = Annotated[str, NAME]
RANKS: Final = msgspec.Meta(max_length=MAX_RANKS)
KNOWN_MODES: Final[frozenset[HandoffMode]] = frozenset(get_args(HandoffMode))
KV_ROLES: Final = {
    Role.PREFILL: "kv_producer",
    Role.DECODE: "kv_consumer",
    Role.BOTH: "kv_both",
}


class KVEventsSource(msgspec.Struct, frozen=True):
    """Where a worker announces the blocks that it keeps and drops (ZMQ)."""

    endpoint: Name
    replay_endpoint: Name | None = None
    topic: Annotated[str, msgspec.Meta(max_length=256)] = ""


class WorkerInfo(msgspec.Struct, frozen=True):
    """The part of a worker's self-description that placement and tickets need.

    `control_urls` has one address for each tensor-parallel rank of a vLLM server, where that rank
    is asked what a Baton worker is asked at its own address; a Baton worker has none. Of `modes`,
    those that this version does not know are left out.
    """

    worker: Annotated[WorkerId, NAME]
    epoch: Annotated[Epoch, msgspec.Meta(min_length=EPOCH_CHARS, max_length=EPOCH_CHARS)]
    role: Role
    served_model_name: Name
    fingerprint: Name
    max_context_tokens: Annotated[int, msgspec.Meta(gt=0)]
    handoff_address: Name
    transports: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]
    version: Name
    protocol: WorkerProtocol = "baton"
    engine: Name | None = None
    rank_addresses: Annotated[tuple[Name, ...], RANKS] = ()
    control_urls: Annotated[tuple[Name, ...], RANKS] = ()
    kv_events: KVEventsSource | None = None
    modes: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)] = ("push",)

    def __post_init__(self) -> None:
        if self.rank_addresses and self.rank_addresses[0] != self.handoff_address:
            raise ValueError("the first of rank_addresses must be handoff_address")
        num_controls = max(1, len(self.rank_addresses)) if self.protocol == "vllm" else 0
        if len(self.control_urls) != num_controls:
            raise ValueError(f"control_urls must have {num_controls} entries")

    def view(
        self, listed_role: Role, *, available: bool, load: WorkerLoad | None = None
    ) -> WorkerView:
        """What placement sees of this worker in the role that the operator gave it."""
        return WorkerView(
            ref=WorkerRef(self.worker, self.epoch, self.handoff_address, self.rank_addresses),
            role=listed_role,
            model=self.served_model_name,
            fingerprint=self.fingerprint,
            transports=frozenset(self.transports),
            available=available,
            protocol=self.protocol,
            modes=KNOWN_MODES & frozenset(self.modes),
            load=load,
        )


class Health(msgspec.Struct, frozen=True):
    """What a Baton worker answers when it is asked how it is. `load` None: it does not say."""

    load: Load | None = None


class Load(msgspec.Struct, frozen=True):
    """A worker's queue and KV blocks."""

    num_waiting: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(gt=0)]
    num_free_blocks: Annotated[int, msgspec.Meta(ge=0)]
    block_size: Annotated[int, msgspec.Meta(gt=0)]

    def view(self) -> WorkerLoad:
        """What placement sees of it."""
        return WorkerLoad(self.num_waiting, self.num_blocks, self.num_free_blocks, self.block_size)


_decoder = msgspec.json.Decoder(WorkerInfo)
_health_decoder = msgspec.json.Decoder(Health)


def read_load(body: bytes) -> WorkerLoad | None:
    """What an answer to `/health` says of a worker's load; None where it says nothing readable."""
    try:
        load = _health_decoder.decode(body).load
    except msgspec.MsgspecError:
        return None
    return None if load is None else load.view()


def read_info(body: bytes) -> WorkerInfo:
    """Decode and bounds-check.

    Raises:
        ProtocolError: not what the wire format allows.
    """
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"what it says about itself does not decode: {exc}") from exc


def why_not_used(info: WorkerInfo, listed: WorkerAddress) -> str | None:
    """Why a worker cannot be used as the operator listed it; None if it can."""
    if info.role not in {listed.role, Role.BOTH}:
        return (
            f"it was listed as a {listed.role} worker but was started with the role {info.role}; "
            f"list it as {_option(info.role)}, or start it with {_role_setting(info, listed.role)}"
        )
    return why_not_asked(info, URL(listed.url))


def why_not_asked(info: WorkerInfo, listed: URL) -> str | None:
    """Why its control addresses are not believed; None if they are.

    They come from the worker, and get the cluster's bearer token: an answer must not be able to
    make the gateway send that, or any request, to a host that the operator never named.
    """
    for text in info.control_urls:
        if (control := _origin(text)) is None:
            return f"its control address {text!r} is not http://host:port"
        if not is_same_host(control.host or "", listed.host or ""):
            return (
                f"its control address {text} is not on the host by which it is listed, "
                f"{listed.host}; start it with "
                f'"kv_connector_extra_config": {{"handoff_host": "{listed.host}"}}'
            )
    return None


def _origin(text: str) -> URL | None:
    try:
        url = URL(text)
        is_origin = url.scheme == "http" and url.host is not None and url.user is None
        return url if is_origin and url == url.origin() else None
    except ValueError:
        return None


def is_same_host(host: str, listed: str) -> bool:
    """Whether what a worker says is on the host by which the operator listed it."""
    return host == listed or (is_loopback(host) and is_loopback(listed))


def _option(role: Role) -> str:
    return "--worker" if role is Role.BOTH else f"--{role}"


def _role_setting(info: WorkerInfo, role: Role) -> str:
    return f'"kv_role": "{KV_ROLES[role]}"' if info.protocol == "vllm" else f"the role {role}"
