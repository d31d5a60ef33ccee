"""`local`: two regions of one process, such as a worker's that prefills and decodes.

Enters: whole page index lists and, of a write, its notification. Leaves: copies made by the owner's
thread, `Arrived` there, and the completion here. An endpoint names a transport of this process; a
peer elsewhere is lost at once, so that another transport is tried.

File map:
    transport.py   options; `LocalTransport`: the contract, admission, the copies; `LocalRemote`
    mailbox.py     messages between the transports of one process, from thread to thread
"""

from functools import partial

from baton.registry import Plugin
from baton.transfer.interface import TransportFactory
from baton.transfer.transports.local.transport import LocalOptions, LocalTransport


def _build(options: LocalOptions) -> TransportFactory:
    return partial(LocalTransport, options)


PLUGIN = Plugin(LocalOptions, _build)
