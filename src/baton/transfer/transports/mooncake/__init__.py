"""`mooncake`: Mooncake's transfer engine, over TCP or, striped over several devices, RDMA.

Enters: whole page index lists and, of a write, its notification. Leaves: pages moved by Mooncake in
a process of its own, then a notification over our own connection. What is not Mooncake's own is in
`baton.transfer.onesided`.

File map:
    session.py   options; one Mooncake, for one peer, in a process of its own; the messages to it
    child.py     that process
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING

from baton.errors import ConfigError
from baton.registry import Plugin
from baton.transfer.endpoints import find_interface
from baton.transfer.onesided.session import Library
from baton.transfer.onesided.transport import OneSidedTransport
from baton.transfer.transports.mooncake.session import (
    MooncakeHandle,
    MooncakeOptions,
    MooncakeSession,
)

if TYPE_CHECKING:
    from baton.transfer.interface import Transport, TransportContext, TransportFactory


def _build(options: MooncakeOptions) -> TransportFactory:
    """The factory.

    Raises:
        ConfigError: Mooncake is not installed.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError("the transport mooncake needs Mooncake: pip install 'baton-kv[mooncake]'")
    return partial(_make_transport, options)


def _make_transport(options: MooncakeOptions, context: TransportContext) -> Transport:
    open_session = partial(
        MooncakeSession,
        options.advertise_host or context.bind_host,
        find_interface(context.bind_host, options.advertise_host),
        protocol=options.protocol,
        devices=",".join(options.devices),
        clock=context.clock,
    )
    return OneSidedTransport[MooncakeHandle](
        "mooncake",
        Library(open_session, reach="network", memory=("shared",)),
        context,
        connect_timeout_s=options.connect_timeout_s,
        max_connections=options.max_connections,
        advertise_host=options.advertise_host,
    )


PLUGIN = Plugin(MooncakeOptions, _build)
