"""A receiver on an address of its own: `python -m tests.contract.receiver_on_a_host TASK`.

Exposes a region, opens one grant of all its pages, says the descriptor in a JSON line, and polls
until its input ends. In a network namespace, if the task names one.
"""

import select
import sys
from dataclasses import replace

import msgspec
import numpy as np

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.ids import Epoch, TicketId, new_epoch
from baton.testing.network_namespaces import move_thread_into
from baton.testing.transport_peer import OWNED_BYTE, wait_for_events
from baton.transfer.interface import TRANSPORTS, TransportContext, WriteGrant
from baton.transfer.region import allocate_shared_region, release_region


class Task(msgspec.Struct):
    kind: str
    options: dict[str, object]
    key_hex: str
    host: str
    shapes: tuple[tuple[int, int], ...]
    writer: Epoch
    grant: bytes
    namespace: str | None = None


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    if task.namespace is not None:
        move_thread_into(task.namespace)
    key = Credentials.of(ClusterKey.from_hex(task.key_hex))
    context = TransportContext(key, new_epoch(), task.host, MachineClock())
    transport = TRANSPORTS.build(task.kind, task.options)(context)
    region = replace(allocate_shared_region(task.shapes), is_public=True)
    np.frombuffer(region.memory, np.uint8)[:] = OWNED_BYTE
    descriptor = transport.expose(region)
    pages = np.arange(task.shapes[0][0])
    transport.open_grant(WriteGrant(TicketId(task.grant), region.handle, task.writer, pages))
    sys.stdout.buffer.write(msgspec.json.encode(descriptor) + b"\n")
    sys.stdout.buffer.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        wait_for_events(transport)
    transport.close()
    release_region(region)


if __name__ == "__main__":
    main()
