"""`tcp`: pages over ordinary sockets, between any two hosts, encrypted if that is wanted.

Enters: whole page index lists and, with a write, its notification. Leaves: frames and page bytes on
several streams; at the receiver, bytes in place and `Arrived`. Of a read: page bytes back.

File map:
    transport.py   `TcpTransport`: the contract, admission, the listening end, reassembly
    remote.py      the dialing end: one peer's region over several streams
    sockets.py     options, sockets, endpoints
    segments.py    what the kernel sent, and sent again: `TCP_INFO`
    wire.py        the messages and their bounds; a write as stripes, one for each stream
"""

from functools import partial

from baton.registry import Plugin
from baton.transfer.interface import TransportFactory
from baton.transfer.transports.tcp.sockets import TcpOptions
from baton.transfer.transports.tcp.transport import TcpTransport


def _build(options: TcpOptions) -> TransportFactory:
    return partial(TcpTransport, options)


PLUGIN = Plugin(TcpOptions, _build)
