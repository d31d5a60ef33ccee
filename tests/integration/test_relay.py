"""Who is on the way, without the key: may forward the handshake, and then change nothing."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.handoff.interface import KVFailed, KVLanded
from baton.net.framing import PREFIX_BYTES
from tests.integration.handoff_nodes import Node, make_handoff, node
from tests.integration.test_handoff_failover import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.ticket import Ticket, WorkerRef

Order = TypeVar("Order")
TCP = ("tcp",)
NUM_TOKENS = 101
NUM_HANDSHAKE_FRAMES = {"dialer": 2, "listener": 1}


class Relay:
    """Listens, connects each who comes to `target`, and forwards frame by frame.

    `change` gets the frames after the handshake that the listener sends, and may return others.
    """

    def __init__(self, target: str, change: Callable[[int, bytes], list[bytes]]) -> None:
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_changed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # `accept` does not end otherwise
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                dialer, _ = self._listener.accept()
                host, _, port = self._target.rpartition(":")
                listener = socket.create_connection((host, int(port)))
                for side, source, sink in (
                    ("dialer", dialer, listener),
                    ("listener", listener, dialer),
                ):
                    threading.Thread(
                        target=self._forward, args=(side, source, sink), daemon=True
                    ).start()

    def _forward(self, side: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), closing(source), closing(sink):
            number = 0
            while (frame := _read_frame(source)) is not None:
                number += 1
                after = number - NUM_HANDSHAKE_FRAMES[side]
                frames = [frame]
                if side == "dialer" and after > 0:
                    frames = self._change(after, frame)
                    self.num_changed += frames != [frame]
                for each in frames:
                    sink.sendall(each)


def _read_frame(sock: socket.socket) -> bytes | None:
    prefix = _read(sock, PREFIX_BYTES)
    if prefix is None:
        return None
    body = _read(sock, int.from_bytes(prefix, "little"))
    return None if body is None else prefix + body


def _read(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            return None
        data += part
    return data


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


def hand_over_through(prefill: Node, decode: Node, relay: Relay) -> object:
    """How a handoff ends for a decode worker that finds the prefill worker at the relay."""
    prefill.scribble(1)
    handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS)
    ticket = handoff.receiving.ticket
    there: WorkerRef = msgspec.structs.replace(ticket.prefill, address=relay.address)
    moved = msgspec.structs.replace(ticket, prefill=there)
    handoff.receiving = _with_ticket(handoff.receiving, moved)
    handoff.sending = _with_ticket(handoff.sending, moved)
    handoff.start_receive()
    handoff.start_send()
    handoff.compute(NUM_TOKENS)
    handoff.prefill_done()
    (event,) = decode.wait_for()[:1]
    return event


def _with_ticket(order: Order, ticket: Ticket) -> Order:
    return replace(order, ticket=ticket)


def forward(_: int, frame: bytes) -> list[bytes]:
    return [frame]


def flip(number: int, frame: bytes) -> list[bytes]:
    """Change one bit of the third message: of a grant, or of what comes beside it."""
    if number != 3:
        return [frame]
    return [frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:]]


def drop(number: int, frame: bytes) -> list[bytes]:
    return [] if number == 3 else [frame]


def repeat(number: int, frame: bytes) -> list[bytes]:
    return [frame, frame] if number == 3 else [frame]


def forge(number: int, frame: bytes) -> list[bytes]:
    """Put a message of its own in between: zeroes where the tag was."""
    if number != 3:
        return [frame]
    body = b"\x81\xa1t\xa4ping" + bytes(16)
    return [len(body).to_bytes(PREFIX_BYTES, "little") + body, frame]


def test_what_is_only_forwarded_arrives(key: Credentials) -> None:
    with (
        node("p", kinds=TCP, key=key) as prefill,
        node("d", kinds=TCP, key=key) as decode,
        closing(Relay(prefill.ref.address, forward)) as relay,
    ):
        assert isinstance(hand_over_through(prefill, decode, relay), KVLanded)
        assert relay.num_changed == 0


@pytest.mark.parametrize("change", [flip, drop, repeat, forge])
def test_what_is_changed_ends_the_link_and_no_more(
    change: Callable[[int, bytes], list[bytes]], key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        node("p", kinds=TCP, key=key) as prefill,
        node("d", kinds=TCP, key=key) as decode,
        closing(Relay(prefill.ref.address, change)) as relay,
    ):
        event = hand_over_through(prefill, decode, relay)
        assert relay.num_changed > 0
        # What is repeated may have been the last that was needed.
        assert isinstance(event, KVFailed) or change is repeat, event
        wait_until(lambda: "was changed, repeated or left out" in caplog.text)
