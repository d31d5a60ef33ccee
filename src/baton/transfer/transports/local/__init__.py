"""`local`: two regions of one process, such as a worker's that prefills and decodes.

Enters: whole page index lists and, of a write, its notification. Leaves: copies made by the owner's
thread, `Arrived` there, and the completion here. An endpoint names a transport of this process; a
peer elsewhere is lost at once, so that another transport is tried.

File map:
    options.py     the options
    mailbox.py     how transports of one process reach each other, from thread to thread
    messages.py    the messages between them
    remote.py      the end that asks: one region of another transport
    transport.py   `LocalTransport`: the contract, admission, the copies
"""

from functools import partial

from baton.registry import Plugin
from baton.transfer.interface import TransportFactory
from baton.transfer.transports.local.options import LocalOptions
from baton.transfer.transports.local.transport import LocalTransport


def _build(options: LocalOptions) -> TransportFactory:
    return partial(LocalTransport, options)


PLUGIN = Plugin(LocalOptions, _build)
