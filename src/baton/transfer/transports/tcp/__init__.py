"""`tcp`: pages over ordinary sockets, between any two hosts.

Enters: whole page index lists and their notice. Leaves: frames on several streams; on the other
side, bytes in place and `Arrived`.

File map:
    options.py     what an operator may say
    transport.py   `TcpTransport`: the contract, windows, admission
    addresses.py   sockets and endpoints
    wire.py        the messages, and their bounds
    geometry.py    which bytes of an array a part names
    buffers.py     those bytes as lists of buffers, in place or staged
    departure.py   a write cut into parts, each a frame and its payload
    remote.py      the writing end: one peer's region over several streams
    inbound.py     the receiving end of one connection
"""

from functools import partial

from baton.registry import Plugin
from baton.transfer.interface import TransportFactory
from baton.transfer.transports.tcp.options import TcpOptions
from baton.transfer.transports.tcp.transport import TcpTransport


def _build(options: TcpOptions) -> TransportFactory:
    return partial(TcpTransport, options)


PLUGIN = Plugin(TcpOptions, _build)
