"""`local` against the public contract: both regions are in this process, so nobody is killed."""

import os
import threading
import time

import numpy as np

from baton.testing.transport_contract import ReadingContract, TransportContract, ViewContract
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import (
    Arrived,
    ReadFailed,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)

ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]


class TestLocal(TransportContract, ReadingContract, ViewContract):
    kind = "local"
    peer_writes = False


class LocalKit(TransportKit):
    kind = "local"


def test_a_transport_reaches_a_region_of_its_own():
    side = LocalKit().make_side()
    side.fill(seed=1)
    events = []
    pair = TransportPair(side, side, events, events)
    remote, grant = pair.attach(), pair.open_grant(range(32))
    upper = [whole_pages(range(32, 64), range(32), PAGE_BYTES)]
    transfer = side.transport.submit(pair.write(remote, grant, upper, notification=b"n"))
    done = WriteCompleted(transfer, 32 * PAGE_BYTES)
    pair.pump(lambda: done in events)
    assert events == [RemoteAttached(remote), Arrived(grant, b"n"), done]
    assert (side.pages()[:32] == side.pages()[32:]).all()
    side.close()


def test_a_forked_child_is_another_process():
    """The child inherits the transport's endpoint in its memory, and must not believe in it."""
    side = LocalKit().make_side()
    child = os.fork()
    if child == 0:
        other = LocalKit().make_side()
        other.transport.attach(side.descriptor)
        events = other.transport.poll()
        os._exit(0 if [type(event) for event in events] == [RemoteLost] else 1)
    assert os.waitpid(child, 0)[1] == 0
    side.close()


def test_what_was_posted_before_detaching_and_not_carried_out_never_is():
    pair = TransportPair.of(LocalKit().make_side(), LocalKit().make_side())
    remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
    pair.reader.fill(seed=2)
    transport, before = pair.writer.transport, pair.reader.snapshot()
    write = transport.submit(pair.write(remote, grant, ALL_PAGES))
    read = transport.read(pair.read(remote, ALL_PAGES))
    transport.detach(remote)
    pair.poll_for()
    assert [event.transfer for event in pair.seen(WriteFailed)] == [write]
    assert [event.transfer for event in pair.seen(ReadFailed)] == [read]
    assert pair.reader.snapshot() == before
    assert not any(pair.writer.region.memory)
    assert not pair.reader_events
    pair.close()


def test_two_threads_write_into_each_other_and_part_at_any_moment():
    """No copy touches the memory of a side that has detached, and nobody waits for ever."""
    pair = TransportPair.of(LocalKit().make_side(), LocalKit().make_side())
    grant = pair.open_grant(range(NUM_PAGES))
    stop = threading.Event()

    def own():
        while not stop.is_set():
            pair.reader_events += pair.reader.transport.poll()

    owner = threading.Thread(target=own)
    owner.start()
    num_ended = {WriteCompleted: 0, WriteFailed: 0}
    transport = pair.writer.transport
    for round_ in range(150):
        remote = transport.attach(pair.reader.descriptor)
        while RemoteAttached(remote) not in transport.poll():
            time.sleep(0)
        pair.writer.pages()[:] = round_
        posted = {transport.submit(pair.write(remote, grant, ALL_PAGES)) for _ in range(4)}
        time.sleep(0.0005 * (round_ % 4))
        events = transport.poll()
        transport.detach(remote)
        pair.writer.pages()[:] = 255  # this side's own again: no page of it may land from now on
        for event in [*events, *transport.poll()]:
            num_ended[type(event)] += 1
            posted.discard(event.transfer)
        assert not posted
        assert not (pair.reader.pages() == 255).any()
    stop.set()
    owner.join()
    assert num_ended[WriteCompleted] + num_ended[WriteFailed] == 600
    assert min(num_ended.values()) > 0
    assert (
        len([e for e in pair.reader_events if isinstance(e, Arrived)]) >= num_ended[WriteCompleted]
    )
    assert np.ptp(pair.reader.pages()) == 0
    pair.close()
