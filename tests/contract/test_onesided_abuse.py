"""Owners and writers that hold the key, speak the one-sided protocol, and break its rules."""

import importlib.util
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from baton.ids import new_epoch, new_ticket_id
from baton.kv.copies import PageCopies
from baton.net.framing import FrameDecoder, ListenerHandshake, encode, encode_frame
from baton.testing.clocks import ManualClock
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES
from baton.testing.transport_contract.peers import UnauthenticatedPeerContract
from baton.testing.transport_pair import whole_pages
from baton.transfer import grant_messages
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    PageRead,
    ReadCompleted,
    ReadFailed,
    RemoteAttached,
    RemoteLost,
    WriteGrant,
)
from baton.transfer.onesided import wire
from baton.transfer.onesided.transport import ANSWER_TIMEOUT_S

if importlib.util.find_spec("nixl_cu12") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

from baton.transfer.transports.nixl.session import NixlMetadata, NixlSession

PARAMETERS = {"engine_config": "TLS=sm", "ucx_error_handling_mode": "none"}


class Kit(UnauthenticatedPeerContract):
    kind = "nixl"

    def connect_unauthenticated(self, descriptor):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + descriptor.endpoint.encode())
        return sock


class NetworkKit(Kit):
    options: ClassVar[Mapping[str, object]] = {"lanes": "network"}

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


class RawWriter:
    """A writer made of a socket: it has attached, and says whatever it is told to."""

    def __init__(self, kit_type=Kit, clock=None):
        kit = kit_type()
        self.kit, self.reader, self.epoch = kit, kit.make_side(clock=clock), new_epoch()
        self.grant, self.events = new_ticket_id(), []
        self.sock = kit.connect_unauthenticated(self.reader.descriptor)
        self.frames = kit.prove(self.reader, self.sock)
        self.open(self.grant)
        self.decoder = FrameDecoder(1 << 20)
        self.say(wire.Attach(self.epoch, self.reader.region.handle))
        self.receive_until(b"attached")
        self.receive_until(b"grant_opened")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()
        self.reader.close()

    def open(self, grant):
        handle, pages = self.reader.region.handle, np.arange(NUM_PAGES)
        self.reader.transport.open_grant(WriteGrant(grant, handle, self.epoch, pages))

    def close_grant(self, grant):
        self.reader.transport.close_grant(grant)
        self.receive_until(b"close_grant")

    def say(self, message):
        self.sock.sendall(self.frames.seal(encode(message)))
        self.poll()

    def poll(self):
        self.events += self.reader.transport.poll()

    def poll_until(self, num_events):
        for _ in range(500):
            if len(self.events) >= num_events:
                return
            self.poll()
            time.sleep(0.005)
        pytest.fail(f"{num_events} were awaited: {self.events}")

    def receive_until(self, kind):
        for _ in range(500):
            self.poll()
            body = self.decoder.take()
            if body is not None:
                assert kind in self.frames.open(body)
                return
            with suppress(TimeoutError):
                self.sock.settimeout(0.005)
                self.decoder.feed(self.sock.recv(4096))
        pytest.fail(f"{kind} was not said")

    def check_hung_up(self):
        self.kit.check_hung_up(self.reader, self.sock)
        self.poll()


def test_notices_count_while_the_grant_is_open():
    with RawWriter() as writer:
        writer.say(wire.WriteNotification(writer.grant, b"good"))
        writer.say(wire.WriteNotification(new_ticket_id(), b"of no grant"))
        writer.reader.transport.close_grant(writer.grant)
        writer.say(wire.WriteNotification(writer.grant, b"late"))
        writer.receive_until(b"close_grant")
        assert writer.events == [Arrived(writer.grant, b"good")]
        writer.say(grant_messages.GrantClosed(writer.grant))
        writer.poll()
        assert writer.events[1:] == [GrantQuiescent(writer.grant)]


@pytest.mark.parametrize(
    "message",
    [
        grant_messages.GrantClosed(bytes(16)),
        wire.Attach("0" * 32, bytes(16)),
        grant_messages.CloseGrant(bytes(16)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_writer_that_breaks_the_rules_is_hung_up_on_and_proves_nothing(message):
    with RawWriter() as writer:
        writer.reader.transport.close_grant(writer.grant)
        writer.say(message)
        writer.check_hung_up()
        assert writer.events == []  # this process lives: its hand might still write


def test_a_farewell_proves_that_nothing_lands():
    with RawWriter() as writer:
        writer.reader.transport.close_grant(writer.grant)
        writer.say(grant_messages.MemoryReleased())
        writer.check_hung_up()
        assert writer.events == [GrantQuiescent(writer.grant)]


def test_the_session_of_a_writer_that_does_not_answer_is_closed_and_its_grant_quiescent():
    clock = ManualClock()
    with RawWriter(NetworkKit, clock) as writer:
        (served,) = writer.reader.transport._writers.values()
        writer.close_grant(writer.grant)
        clock.advance(ANSWER_TIMEOUT_S - 0.1)
        writer.poll()
        assert (writer.events, served._session._agent is None) == ([], False)
        clock.advance(0.2)
        writer.poll()
        assert (writer.events, served._session._agent) == ([GrantQuiescent(writer.grant)], None)
        writer.check_hung_up()


def test_a_writer_that_goes_on_writing_has_more_time_to_answer():
    clock, other = ManualClock(), new_ticket_id()
    with RawWriter(NetworkKit, clock) as writer:
        writer.open(other)
        writer.receive_until(b"grant_opened")
        writer.close_grant(writer.grant)
        for n in range(3):
            clock.advance(0.9 * ANSWER_TIMEOUT_S)
            writer.say(wire.WriteNotification(other, b"of another handoff"))
            writer.poll_until(n + 1)
        assert [type(event) for event in writer.events] == 3 * [Arrived]
        clock.advance(1.1 * ANSWER_TIMEOUT_S)
        writer.check_hung_up()


def test_a_writer_has_the_time_for_each_answer_and_is_left_alone_after_the_last_one():
    clock, second = ManualClock(), new_ticket_id()
    with RawWriter(NetworkKit, clock) as writer:
        writer.open(second)
        writer.receive_until(b"grant_opened")
        for grant in (writer.grant, second):
            writer.close_grant(grant)
        for grant in (writer.grant, second):
            clock.advance(0.9 * ANSWER_TIMEOUT_S)
            writer.say(grant_messages.GrantClosed(grant))
            writer.poll_until(1)
            assert writer.events.pop() == GrantQuiescent(grant)
        clock.advance(10 * ANSWER_TIMEOUT_S)
        writer.say(wire.TransfersActive())
        assert writer.reader.transport._pacer.is_set


def test_a_writer_that_answers_for_later_grants_alone_is_disconnected():
    clock, later = ManualClock(), [new_ticket_id() for _ in range(3)]
    with RawWriter(NetworkKit, clock) as writer:
        writer.close_grant(writer.grant)
        for grant in later:
            writer.open(grant)
            writer.receive_until(b"grant_opened")
            writer.close_grant(grant)
            clock.advance(0.4 * ANSWER_TIMEOUT_S)
            with suppress(ConnectionError):
                writer.say(grant_messages.GrantClosed(grant))
        writer.check_hung_up()
        assert GrantQuiescent(writer.grant) in writer.events


def test_a_silent_writer_whose_own_process_writes_is_waited_for():
    clock = ManualClock()
    with RawWriter(Kit, clock) as writer:
        writer.close_grant(writer.grant)
        clock.advance(10 * ANSWER_TIMEOUT_S)
        writer.say(wire.TransfersActive())
        assert (writer.events, writer.reader.transport._pacer.is_set) == ([], True)


def test_a_peer_that_says_that_it_moves_costs_a_poll_a_millisecond_until_it_rests():
    with RawWriter() as writer:
        writer.say(wire.TransfersActive())
        assert writer.reader.transport._pacer.is_set
        writer.say(wire.TransfersIdle())
        writer.poll()
        assert not writer.reader.transport._pacer.is_set


def lie_in_the_introduction(change):
    """A reader attaches to an owner made of a socket, whose introduction `change` makes."""
    kit = Kit()
    reader, true = kit.make_side(), kit.make_side()
    true.fill(seed=3)
    session = NixlSession(PARAMETERS, peer_process_writes=True)
    metadata = change(
        msgspec.msgpack.decode(session.get_metadata(true.region), type=NixlMetadata),
    )
    listener = socket.socket(socket.AF_UNIX)
    name = "baton-" + secrets.token_hex(16)
    listener.bind(b"\0" + name.encode())
    listener.listen()
    descriptor = msgspec.structs.replace(true.descriptor, endpoint=name)
    remote = reader.transport.attach(descriptor)
    sock, _ = listener.accept()
    sock.settimeout(5)
    handshake = ListenerHandshake(kit.credentials, "nixl")
    events, decoder = [], FrameDecoder(1 << 20)

    def receive_until():
        while (body := decoder.take()) is None:
            events.extend(reader.transport.poll())
            with suppress(BlockingIOError):
                decoder.feed(sock.recv(4096, socket.MSG_DONTWAIT))
        return body

    sock.sendall(handshake.reply(receive_until()))
    handshake.reply(receive_until())
    assert wire.decode_attach(receive_until()).region == true.region.handle
    sock.sendall(encode_frame(encode(wire.Attached(descriptor.arrays, metadata))))
    for _ in range(100):
        events.extend(reader.transport.poll())
    copies = PageCopies(0, (whole_pages([3], [4], PAGE_BYTES),))
    transfer = reader.transport.read(PageRead(remote, reader.region.handle, copies))
    events.extend(reader.transport.poll())
    read = bytes(reader.pages()[4])
    truth = bytes(true.pages()[3])
    session.close()
    for closing in (sock, listener, reader, true):
        closing.close()
    return remote, transfer, events, read, truth


def test_an_owner_that_tells_the_truth_is_read():
    remote, transfer, events, read, truth = lie_in_the_introduction(msgspec.msgpack.encode)
    assert events == [RemoteAttached(remote), ReadCompleted(transfer, PAGE_BYTES)]
    assert read == truth


def replaced(**changes):
    return lambda true: msgspec.msgpack.encode(msgspec.structs.replace(true, **changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"",
        lambda _: b"\xc1",
        lambda true: msgspec.msgpack.encode(true)[:-1],
        replaced(agent=b""),
        replaced(agent=b"\0" * 100),
        lambda true: replaced(agent=true.agent[: len(true.agent) // 2])(true),
        lambda true: replaced(base=true.base + (1 << 30))(true),
        replaced(base=0),
        replaced(base=-4096),
        replaced(base=(1 << 63) - 1),
    ],
    ids=[
        "nothing",
        "no msgpack",
        "truncated",
        "no agent",
        "zeros for an agent",
        "half an agent",
        "elsewhere",
        "nowhere",
        "negative",
        "overflow",
    ],
)
def test_an_owner_that_lies_in_its_introduction_is_lost_and_not_read(change):
    remote, transfer, events, read, _ = lie_in_the_introduction(change)
    lost = [event for event in events if isinstance(event, RemoteLost)]
    failed = [event for event in events if isinstance(event, ReadFailed)]
    assert [each.remote for each in lost] == [remote]
    assert [each.transfer for each in failed] == [transfer]
    assert not any(read)
