"""`nixl`: NVIDIA's transfer library over UCX; its agents read and write registered memory.

Enters: whole page index lists and, of a write, its notification. Leaves: pages moved by UCX (by
cross-memory attach on one host; by RDMA or TCP between hosts), then a notification over our own
connection. What is not NIXL's own is in `baton.transfer.onesided`.

File map:
    agent.py      the installed wheel, its errors and its logging; what is used of NIXL, typed
    lists.py      prepared descriptor lists
    session.py    options; one agent, for one peer: pages become transfers
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from baton.config.environment import read_environment
from baton.errors import ConfigError, TransferError
from baton.registry import Plugin
from baton.transfer.endpoints import find_interface
from baton.transfer.onesided.session import Library
from baton.transfer.onesided.transport import OneSidedTransport
from baton.transfer.transports.nixl.agent import load_nixl
from baton.transfer.transports.nixl.session import NixlHandle, NixlOptions, NixlSession

if TYPE_CHECKING:
    from baton.transfer.interface import Transport, TransportContext, TransportFactory


def _build(options: NixlOptions) -> TransportFactory:
    """The factory.

    Raises:
        ConfigError: NIXL is not installed, or the environment would choose other lanes.
    """
    load_nixl()
    if "UCX_TLS" in read_environment():  # it overrides what an agent is given
        raise ConfigError(
            "UCX_TLS is set, so that the transport nixl cannot know how UCX moves bytes: unset it, "
            "and set the option lanes"
        )
    return partial(_make_transport, options)


def _make_transport(options: NixlOptions, context: TransportContext) -> Transport:
    return OneSidedTransport[NixlHandle](
        "nixl",
        _choose_library(options, context.bind_host),
        context,
        connect_timeout_s=options.connect_timeout_s,
        max_connections=options.max_connections,
        advertise_host=options.advertise_host,
    )


def _choose_library(options: NixlOptions, bind_host: str) -> Library[NixlHandle]:
    if options.lanes == "host":
        # UCX has no error handling for shared memory, and needs none: a peer's end is ours to see.
        parameters = {"engine_config": "TLS=sm", "ucx_error_handling_mode": "none"}
        return Library(partial(NixlSession, parameters, peer_process_writes=True), reach="host")
    device = options.device or _find_device(bind_host, options.advertise_host)
    parameters = {
        "engine_config": f"TLS=^sm,NET_DEVICES={device}",
        "ucx_error_handling_mode": "peer",
    }
    return Library(partial(NixlSession, parameters, peer_process_writes=False), reach="network")


def _find_device(bind_host: str, advertise_host: str | None) -> str:
    try:
        return find_interface(bind_host, advertise_host)
    except TransferError as exc:
        raise TransferError(f"{exc}: set nixl.device to the interface that UCX is to use") from exc


PLUGIN = Plugin(NixlOptions, _build)
