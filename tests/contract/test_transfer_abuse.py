"""Peers that hold the key and break the rules after attaching, byte by byte over raw sockets."""

import fcntl
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.ids import new_epoch, new_ticket_id
from baton.kv.copies import PageCopies
from baton.net import channel
from baton.net.framing import FrameDecoder, ListenerHandshake, encode, encode_frame
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES
from baton.testing.transport_contract.peers import UnauthenticatedPeerContract
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer import grant_messages
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    PageRead,
    ReadCompleted,
    ReadFailed,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteGrant,
)
from baton.transfer.messages import NotAttached
from baton.transfer.region import compute_region_bytes
from baton.transfer.transports.shared import wire as shared
from baton.transfer.transports.tcp import transport
from baton.transfer.transports.tcp import wire as tcp

HOLDER = b"a raw one's page"
PAGE = np.array([2]).astype("<u4").tobytes()
WHOLE = np.array([0, PAGE_BYTES]).astype("<u4").tobytes()


class SharedKit(UnauthenticatedPeerContract):
    kind = "shared"

    def connect_unauthenticated(self, descriptor):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + descriptor.endpoint.encode())
        return sock


class TcpKit(UnauthenticatedPeerContract):
    kind = "tcp"

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


class RawWriter:
    """A writer made of a socket: it has attached, and says whatever it is told to."""

    def __init__(self, kit, *, pages=range(NUM_PAGES), reader=None):
        self.kit, self.reader, self.epoch = kit, reader or kit.make_side(), new_epoch()
        self.grant, self.events = new_ticket_id(), []
        self.sock = kit.connect_unauthenticated(self.reader.descriptor)
        self.frames = kit.prove(self.reader, self.sock)
        handle = self.reader.region.handle
        self.reader.transport.open_grant(
            WriteGrant(self.grant, handle, self.epoch, np.array(pages))
        )
        self.decoder = FrameDecoder(1 << 20)
        if kit.kind == "tcp":
            self.say(tcp.Attach(self.epoch, handle, bytes(16)))
        else:
            self.say(shared.Attach(self.epoch, handle, HOLDER, is_only=True))
        self.receive_until(b"attached")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()
        self.reader.close()

    def say(self, message, payload=b""):
        self.send(self.frames.seal(encode(message)) + payload)

    def send(self, data):
        while data:
            with suppress(TimeoutError):
                data = data[self.sock.send(data) :]
            self.poll()

    def poll(self):
        self.events += self.reader.transport.poll()

    def receive_until(self, word):
        """The next body that is said to this writer, which has this word in it."""
        for _ in range(400):
            self.poll()
            body = self.decoder.take()
            if body is not None:
                body = self.frames.open(body)
                assert word in body
                return body
            with suppress(TimeoutError):
                self.decoder.feed(self.sock.recv(4096))
        raise AssertionError("nothing was said")

    def check_hung_up(self):
        for _ in range(400):
            self.poll()
            with suppress(TimeoutError):
                try:
                    if not self.sock.recv(4096):
                        return
                except ConnectionResetError:
                    return
        raise AssertionError("the connection is still open")

    def data(self, **changes):
        fields = {"sequence": 0, "grant": self.grant, "array": 0, "dst_pages": PAGE}
        return tcp.Data(**{**fields, "spans": WHOLE, "notification": b"n", **changes})

    @property
    def page(self):
        return self.reader.pages()[2]


def test_a_raw_writer_that_keeps_the_rules_is_served():
    with RawWriter(TcpKit()) as writer:
        writer.say(writer.data(), b"x" * PAGE_BYTES)
        assert tcp.decode_from_listener(writer.receive_until(b"write_landed")) == tcp.WriteLanded(0)
        assert set(writer.page.tolist()) == {ord("x")}
        assert writer.events == [Arrived(writer.grant, b"n")]


@pytest.mark.parametrize(
    "changes",
    [
        {"array": 2},
        {"dst_pages": b"\xff\xff\xff\xff"},
        {"dst_pages": b"123"},
        {"spans": b"\1\0\0\0" + WHOLE[4:]},
        {"spans": WHOLE * 2},
        {"sequence": 0},
    ],
)
def test_a_part_out_of_bounds_ends_the_connection(changes):
    with RawWriter(TcpKit()) as writer:
        writer.say(writer.data(), b"x" * PAGE_BYTES)
        writer.receive_until(b"write_landed")
        before = writer.reader.snapshot()
        with suppress(ConnectionError):
            writer.say(writer.data(**{"sequence": 1, **changes}), b"y" * PAGE_BYTES)
        writer.check_hung_up()
        assert writer.reader.snapshot() == before
        assert len(writer.events) == 1


def test_a_write_that_begins_inside_another_ends_the_connection():
    with RawWriter(TcpKit()) as writer:
        writer.say(writer.data(notification=None), b"x" * PAGE_BYTES)
        writer.say(writer.data(sequence=1))
        writer.check_hung_up()
        assert writer.events == []


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 100])
def test_a_payload_in_mid_flight_lands_nowhere_once_the_grant_is_closed(page_bytes):
    """Whole pages are received in place, spans of 100 bytes by way of a staging buffer."""
    spans = np.array([0, page_bytes]).astype("<u4").tobytes()
    with RawWriter(TcpKit()) as writer:
        writer.say(writer.data(spans=spans), b"x" * (page_bytes // 2))
        for _ in range(5):
            writer.poll()
        writer.reader.transport.close_grant(writer.grant)
        at_close = writer.reader.snapshot()
        writer.send(b"y" * (page_bytes - page_bytes // 2))
        reply = tcp.decode_from_listener(writer.receive_until(b"write_refused"))
        assert reply == tcp.WriteRefused(0, "the grant was closed")
        assert writer.reader.snapshot() == at_close
        assert writer.events == [GrantQuiescent(writer.grant)]


def test_a_payload_in_mid_flight_lands_nowhere_once_its_handoff_has_ended():
    """Whoever has reported its last write may have begun another, whose payload it holds back."""
    with RawWriter(TcpKit()) as writer:
        writer.say(writer.data(), b"x" * (PAGE_BYTES // 2))
        for _ in range(5):
            writer.poll()
        assert writer.reader.transport.finish_grant(writer.grant)
        at_end = writer.reader.snapshot()
        writer.send(b"y" * (PAGE_BYTES // 2))
        reply = tcp.decode_from_listener(writer.receive_until(b"write_refused"))
        assert reply == tcp.WriteRefused(0, "the grant was closed")
        assert writer.reader.snapshot() == at_end
        assert writer.events == []


def test_a_write_in_parts_is_refused_once_and_its_connection_goes_on():
    with RawWriter(TcpKit(), pages=[2]) as writer:
        outside = b"\5\0\0\0"
        writer.say(writer.data(notification=None), b"x" * PAGE_BYTES)
        writer.say(writer.data(dst_pages=outside, notification=None), b"y" * PAGE_BYTES)
        writer.say(writer.data(), b"z" * PAGE_BYTES)
        reply = tcp.decode_from_listener(writer.receive_until(b"write_refused"))
        assert reply == tcp.WriteRefused(0, "a page is outside the grant")
        assert set(writer.page.tolist()) == {ord("x")}
        writer.say(writer.data(sequence=1), b"w" * PAGE_BYTES)
        writer.receive_until(b"write_landed")
        assert writer.events == [Arrived(writer.grant, b"n")]


def test_a_large_write_travels_in_parts(monkeypatch):
    monkeypatch.setattr(tcp, "MAX_PART_BYTES", 3 * PAGE_BYTES + 5)
    kit = TcpKit()
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
    groups = [
        whole_pages(range(10), range(10), PAGE_BYTES),
        whole_pages(range(20, 60), range(59, 19, -1), PAGE_BYTES),
    ]
    pair.writer.transport.submit(pair.write(remote, grant, groups, notification=b"once"))
    pair.pump(lambda: bool(pair.seen(WriteCompleted)))
    assert pair.seen(Arrived) == [Arrived(grant, b"once")]
    assert (pair.reader.pages()[:10] == pair.writer.pages()[:10]).all()
    assert (pair.reader.pages()[20:60] == pair.writer.pages()[20:60][::-1]).all()
    pair.close()


@pytest.mark.parametrize("message", [grant_messages.GrantClosed(bytes(16)), tcp.WriteLanded(3)])
def test_an_answer_to_nothing_ends_a_shared_connection(message):
    with RawWriter(SharedKit()) as writer:
        writer.receive_until(b"grant_opened")
        writer.say(message)
        writer.check_hung_up()


def test_notices_for_closed_or_unknown_grants_are_dropped():
    with RawWriter(SharedKit()) as writer:
        writer.receive_until(b"grant_opened")
        writer.say(shared.WriteNotification(bytes(16), b"unknown"))
        writer.say(shared.WriteNotification(writer.grant, b"good"))
        for _ in range(5):
            writer.poll()
        writer.reader.transport.close_grant(writer.grant)
        writer.receive_until(b"close_grant")
        writer.say(shared.WriteNotification(writer.grant, b"late"))
        writer.say(grant_messages.GrantClosed(writer.grant))
        for _ in range(5):
            writer.poll()
        assert writer.events == [
            Arrived(writer.grant, b"good"),
            GrantQuiescent(writer.grant),
        ]


def test_a_broken_connection_is_no_proof_but_a_farewell_is():
    with RawWriter(SharedKit()) as writer:
        writer.reader.transport.close_grant(writer.grant)
        writer.say(
            grant_messages.GrantClosed(bytes(16))
        )  # against the rules: the connection is ended
        writer.check_hung_up()
        assert writer.events == []  # this process lives: it might still write
    with RawWriter(SharedKit()) as writer:
        writer.reader.transport.close_grant(writer.grant)
        writer.say(grant_messages.MemoryReleased())
        writer.check_hung_up()
        assert writer.events == [GrantQuiescent(writer.grant)]


@pytest.mark.parametrize(
    ("holder", "is_only", "is_proof"),
    [(HOLDER, True, True), (HOLDER, False, False), (b"another holder !", True, False)],
)
def test_only_the_same_holder_that_has_no_other_mapping_proves_the_first_one_gone(
    holder, is_only, is_proof
):
    with RawWriter(SharedKit()) as writer:
        writer.receive_until(b"grant_opened")
        writer.reader.transport.close_grant(writer.grant)
        writer.sock.close()
        writer.sock = writer.kit.connect_unauthenticated(writer.reader.descriptor)
        writer.frames = writer.kit.prove(writer.reader, writer.sock)
        writer.decoder = FrameDecoder(1 << 20)
        handle = writer.reader.region.handle
        writer.say(shared.Attach(writer.epoch, handle, holder, is_only))
        writer.receive_until(b"attached")
        assert writer.events == ([GrantQuiescent(writer.grant)] if is_proof else [])


def test_a_write_waits_until_its_grant_is_heard_of():
    """Should the grant overtake `opened`, the writer asks; the answer decides."""
    kit = SharedKit()
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), new_ticket_id()
    groups = [whole_pages([1], [1], PAGE_BYTES)]
    transfer = pair.writer.transport.submit(pair.write(remote, grant, groups))
    handle = pair.reader.region.handle
    pair.reader.transport.open_grant(
        WriteGrant(grant, handle, pair.writer.epoch, np.arange(NUM_PAGES))
    )
    pair.pump(lambda: bool(pair.seen(WriteCompleted) and pair.seen(Arrived)))
    assert pair.seen(WriteCompleted) == [WriteCompleted(transfer, PAGE_BYTES)]
    assert (pair.reader.pages()[1] == pair.writer.pages()[1]).all()
    pair.close()


def lie_about_memory(kit, make_memory, answer=shared.Attached):
    """A reader attaches to an owner made of a socket, which hands over what `make_memory` makes.

    It does so with `answer`, made of the region's arrays.
    """
    reader, true = kit.make_side(), kit.make_side()
    listener = socket.socket(socket.AF_UNIX)
    name = f"baton-{secrets.token_hex(16)}"  # one name for all processes of this host
    listener.bind(b"\0" + name.encode())
    listener.listen()
    descriptor = msgspec.structs.replace(true.descriptor, endpoint=name)
    remote = reader.transport.attach(descriptor)
    sock, _ = listener.accept()
    sock.settimeout(5)
    handshake = ListenerHandshake(kit.credentials, "shared")
    events, decoder = [], FrameDecoder(1 << 20)

    def receive_until():
        while (body := decoder.take()) is None:
            events.extend(reader.transport.poll())
            with suppress(BlockingIOError):
                decoder.feed(sock.recv(4096, socket.MSG_DONTWAIT))
        return body

    sock.sendall(handshake.reply(receive_until()))
    handshake.reply(receive_until())
    assert shared.decode_attach(receive_until()).region == true.region.handle
    fd = make_memory(compute_region_bytes(descriptor.arrays))
    socket.send_fds(sock, [encode_frame(encode(answer(descriptor.arrays)))], [fd])
    os.close(fd)
    for _ in range(100):
        events.extend(reader.transport.poll())
    copies = PageCopies(0, (whole_pages([3], [4], PAGE_BYTES),))
    transfer = reader.transport.read(PageRead(remote, reader.region.handle, copies))
    events.extend(reader.transport.poll())
    for closing in (sock, listener, reader, true):
        closing.close()
    return remote, transfer, events


def make_memfd(num_bytes, *, sealed):
    fd = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize(
    "make_memory",
    [
        lambda num_bytes: make_memfd(num_bytes - 1, sealed=True),
        lambda num_bytes: make_memfd(num_bytes, sealed=False),
        lambda _: os.open("/dev/zero", os.O_RDWR),
    ],
    ids=["too small", "may shrink", "no memfd"],
)
def test_an_owner_that_lies_about_its_memory_is_lost_and_not_read(make_memory):
    remote, transfer, events = lie_about_memory(SharedKit(), make_memory)
    assert [type(event) for event in events] == [RemoteLost, ReadFailed]
    assert (events[0].remote, events[1].transfer) == (remote, transfer)


@pytest.mark.parametrize(
    "answer",
    [lambda _: NotAttached("no"), lambda _: tcp.WriteLanded(0)],
    ids=["refusal", "another message"],
)
def test_a_descriptor_that_comes_with_another_answer_is_closed(answer):
    _, _, events = lie_about_memory(
        SharedKit(), lambda num_bytes: make_memfd(num_bytes, sealed=True), answer
    )
    assert [type(event) for event in events] == [RemoteLost, ReadFailed]
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            targets.append(str(entry.readlink()))
    assert not [target for target in targets if "memfd:lie" in target]


def test_an_owner_that_tells_the_truth_is_read():
    """The same owner, made of a socket: what the lies above change is the memory alone."""
    remote, transfer, events = lie_about_memory(
        SharedKit(), lambda num_bytes: make_memfd(num_bytes, sealed=True)
    )
    assert events == [RemoteAttached(remote), ReadCompleted(transfer, PAGE_BYTES)]


def test_a_raw_reader_that_keeps_the_rules_is_served():
    with RawWriter(TcpKit()) as reader:
        reader.reader.fill(seed=3)
        reader.say(tcp.Fetch(4, 0, PAGE, WHOLE))
        assert tcp.decode_from_listener(reader.receive_until(b"fetch_served")) == tcp.FetchServed(4)
        received = bytes(reader.decoder._buffer)
        while len(received) < PAGE_BYTES:
            reader.poll()
            with suppress(TimeoutError):
                received += reader.sock.recv(PAGE_BYTES - len(received))
        assert received == reader.page.tobytes()


@pytest.mark.parametrize(
    ("array", "pages", "spans"),
    [
        (2, PAGE, WHOLE),
        (0, b"\xff\xff\xff\xff", WHOLE),
        (0, b"123", WHOLE),
        (0, PAGE, b"\1\0\0\0" + WHOLE[4:]),
        (0, PAGE, bytes(8)),
        (0, PAGE * 65_536, WHOLE * 3),
    ],
    ids=["array", "page", "packing", "span", "empty span", "too much"],
)
def test_a_fetch_out_of_bounds_ends_the_connection_and_tells_nothing(array, pages, spans):
    with RawWriter(TcpKit()) as reader:
        reader.say(tcp.Fetch(0, array, pages, spans))
        reader.check_hung_up()


def test_a_reader_that_asks_and_never_takes_is_hung_up_on():
    """What waits for it is bounded by the number of fetches, and holds no copy of a page."""
    with RawWriter(TcpKit()) as reader:
        pages = np.arange(NUM_PAGES).astype("<u4").tobytes() * 64
        with suppress(ConnectionError):
            for number in range(transport.MAX_FETCHES + 20):
                reader.say(tcp.Fetch(number, 0, pages, WHOLE))
        for _ in range(50):
            reader.poll()
        assert not reader.reader.transport._inbound


@pytest.mark.parametrize(
    "answer", [tcp.FetchServed(0), tcp.WriteLanded(0), tcp.WriteRefused(0, "no"), tcp.Attached(())]
)
def test_an_owner_that_answers_what_was_not_asked_is_lost(answer):
    kit = TcpKit()
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    remote = pair.attach()
    before = pair.writer.snapshot()
    for connection in pair.reader.transport._inbound:
        connection.send_body(encode(answer))
    pair.pump(lambda: bool(pair.seen(RemoteLost)))
    assert [lost.remote for lost in pair.seen(RemoteLost)] == [remote]
    assert pair.writer.snapshot() == before
    pair.close()


def test_stripes_of_one_write_that_contradict_each_other_end_the_connection():
    with RawWriter(TcpKit()) as writer:
        writer.say(writer.data(stripes=2), b"x" * PAGE_BYTES)
        for _ in range(5):
            writer.poll()
        assert writer.events == []  # half of a write is no write
        writer.say(writer.data(sequence=1, stripes=17))
        writer.check_hung_up()


def test_while_much_is_to_come_readiness_waits_for_a_good_deal_of_it():
    kit = TcpKit()
    shapes = ((1024, 65_536),)
    pair = TransportPair.of(kit.make_side(shapes), kit.make_side(shapes))
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(1024))
    groups = [whole_pages(range(1024), range(1024), 65_536)]

    def awaited():
        sockets = [connection.channel.socket for connection in pair.reader.transport._inbound]
        return {sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) for sock in sockets}

    assert awaited() == {1}
    pair.writer.transport.submit(pair.write(remote, grant, groups))
    pair.pump(lambda: bool(pair.reader.pages()[0].any()))
    assert channel.WAKE_BYTES in awaited()
    pair.pump(lambda: bool(pair.seen(WriteCompleted)))
    assert awaited() == {1}
    assert (pair.reader.pages() == pair.writer.pages()).all()
    pair.close()
