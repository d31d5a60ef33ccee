"""`file`: pages through a directory that both workers see.

When one would use it: where the two can reach a common filesystem but no common memory, and sockets
carry little (an NVMe that two containers mount, a fast parallel filesystem or NFS between hosts
whose network is slow or filtered but for one port); or to compare. Between processes of one host
`shared` is faster, between hosts with a good network `tcp` is.

Enters: whole page index lists and their notification. Leaves: part files (files of up to 16 MiB) in
the receiver's own folder, then word of each over a small connection; on the other side the bytes in
place, the part file gone, and `Arrived`.

File map:
    transport.py   options; `FileTransport`: the contract, admission, the receiving end
    remote.py      the writing end
    spool.py       the receiver's directory, and its files, written or read a slice at a time
    wire.py        the messages, and their bounds
"""

from functools import partial

from baton.registry import Plugin
from baton.transfer.interface import TransportFactory
from baton.transfer.transports.file.remote import FileOptions
from baton.transfer.transports.file.transport import FileTransport


def _build(options: FileOptions) -> TransportFactory:
    return partial(FileTransport, options)


PLUGIN = Plugin(FileOptions, _build)
