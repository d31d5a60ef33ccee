"""`tcp`: pages over ordinary sockets, between any two hosts, encrypted if that is wanted.

Enters: whole page index lists and, of a write, its notification. Leaves: frames and page bytes on
several
streams; on the other side, bytes in place and `Arrived`. Of a read: page bytes on their way back.

File map:
    options.py     the options
    transport.py   `TcpTransport`: the contract, grants, admission
    addresses.py   sockets and endpoints
    wire.py        the messages, and their bounds
    send_path.py   a write cut into stripes, each of which one stream carries
    remote.py      the dialing end: one peer's region over several streams
    stream.py      one of those: what was asked for over it, and the bytes that come back
    inbound.py     the listening end of one connection
    reassembly.py  writes of which some stripes are missing (pure)
"""

from functools import partial

from baton.registry import Plugin
from baton.transfer.interface import TransportFactory
from baton.transfer.transports.tcp.options import TcpOptions
from baton.transfer.transports.tcp.transport import TcpTransport


def _build(options: TcpOptions) -> TransportFactory:
    return partial(TcpTransport, options)


PLUGIN = Plugin(TcpOptions, _build)
