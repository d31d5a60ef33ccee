"""`shared`: one host's memory, written or read in place by the peer.

Enters: whole page index lists and, of a write, its notification. Leaves: stores into the receiver's
pages, then a notification over a Unix socket; on the other side `Arrived`, and quiescence by answer
or proof of death. Of a read: the peer's bytes in this side's pages; the peer receives nothing.

File map:
    transport.py   options; `SharedTransport`: the contract, admission, the receiving end
    remote.py      the writing, or reading, end: one peer's region, mapped into this process
    wire.py        the messages, and their bounds
"""

from functools import partial

from baton.registry import Plugin
from baton.transfer.interface import TransportFactory
from baton.transfer.transports.shared.transport import SharedOptions, SharedTransport


def _build(options: SharedOptions) -> TransportFactory:
    return partial(SharedTransport, options)


PLUGIN = Plugin(SharedOptions, _build)
