"""Who holds no key and will not go: the listeners of an agent serve its peers all the same."""

from __future__ import annotations

import logging
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.handoff import peers
from baton.handoff.peers import AUTHENTICATION_TIMEOUT_S, MAX_UNPROVED
from baton.net import endpoints
from baton.net.framing import DialerHandshake
from tests.integration.handoff_nodes import FIRST, Node, make_handoff, node
from tests.integration.test_handoff_failover import wait_until
from tests.unit.handoff.orders import make_ticket, receive_order

if TYPE_CHECKING:
    from collections.abc import Iterator

TCP = ("tcp",)
NUM_TOKENS = 101
CROWD = """
import socket, sys, time
held = []
for _ in range(int(sys.argv[3])):
    held.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
print(len(held), flush=True)
time.sleep(60)
"""


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def cpu_of_a_second() -> float:
    before = time.process_time()  # /proc may not be opened
    time.sleep(1.0)
    return time.process_time() - before


@contextmanager
def crowd(address: str, num_connections: int) -> Iterator[None]:
    """Another process connects so often, says nothing, and stays."""
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-c", CROWD, host, port, str(num_connections)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == str(num_connections)
            yield
        finally:
            process.kill()


def hand_over(prefill: Node, decode: Node) -> None:
    prefill.scribble(1)
    handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS)
    handoff.start_receive()
    handoff.start_send()
    handoff.compute(NUM_TOKENS)
    handoff.prefill_done()
    handoff.check_landed(FIRST)


def test_a_byte_now_and_then_buys_no_time(key: Credentials) -> None:
    opening = DialerHandshake(key, "handoff").opening()
    with node("p", kinds=TCP, key=key) as worker, connect(worker.ref.address) as stranger:
        since = time.monotonic()
        for byte in opening:  # would take three times as long as anybody has
            if is_closed(stranger):
                break
            stranger.send(bytes([byte]))
            time.sleep(3 * AUTHENTICATION_TIMEOUT_S / len(opening))
        else:
            raise AssertionError("it was listened to until its last byte")
        assert time.monotonic() - since >= AUTHENTICATION_TIMEOUT_S


def test_strangers_that_take_all_places_give_the_oldest_to_a_peer(
    key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with (
        node("p", kinds=TCP, key=key) as prefill,
        node("d", kinds=TCP, key=key) as decode,
        crowd(prefill.ref.address, MAX_UNPROVED),
    ):
        wait_until(lambda: len(list(prefill.agent.loop._peers)) == MAX_UNPROVED)
        hand_over(prefill, decode)
    assert "have not proved the key either" in caplog.text


def test_peers_are_warned_of_after_any_number_of_connections_and_of_warnings(
    key: Credentials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "MAX_WARNINGS", 2)
    with node("p", kinds=TCP, key=key) as prefill:
        for number in range(3):
            with connect(prefill.ref.address) as sock:
                sock.sendall(b"%08x" % number)  # no handshake, and another error for each
                wait_until(lambda: is_closed(sock))
        for model in ("b", "c", "d"):
            with node("d", kinds=TCP, key=key, fingerprint=f"model-{model}") as decode:
                ticket = make_ticket(prefill.ref, decode.ref)
                decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
                decode.wait_for(2)
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert sum("a connection was closed" in text for text in warned) == 1
    refused = [text for text in warned if "link to an unknown peer ended" in text]
    assert [text.partition("model-")[2][0] for text in refused] == ["b", "c", "d"]


def test_data_listeners_do_the_same(key: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_UNPROVED", 4)
    with (
        node("p", kinds=TCP, key=key) as prefill,
        node("d", kinds=TCP, key=key) as decode,
        ExitStack() as held,
    ):
        for worker in (prefill, decode):
            for address in find_data_addresses(worker):
                held.enter_context(crowd(address, 4))
        hand_over(prefill, decode)


def find_data_addresses(worker: Node) -> list[str]:
    (transport,) = worker.agent.options.transports
    name = transport._listener._socket.getsockname()  # type: ignore[attr-defined]
    return [f"{name[0]}:{name[1]}"]


def test_without_a_descriptor_left_the_agent_waits_and_says_so(
    key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with (
        node("p", kinds=TCP, key=key) as prefill,
        node("d", kinds=TCP, key=key) as decode,
    ):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        address = prefill.ref.address
        host, _, port = address.rpartition(":")
        command = [sys.executable, "-c", CROWD, host, port, "40"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
            fillers = take_descriptors_up_to(highest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
            try:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == "40"
                wait_until(lambda: "no peer can be accepted" in caplog.text)
                # A busy machine makes work dearer for a while; what spins does so each time.
                assert any(cpu_of_a_second() < 0.3 for _ in range(3))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                process.kill()
                for filler in fillers:
                    os.close(filler)
        hand_over(prefill, decode)


def take_descriptors_up_to(highest: int) -> list[int]:
    """Fill the gaps below it: the limit is one on numbers."""
    taken = [os.dup(2)]
    while taken[-1] < highest:
        taken.append(os.dup(2))
    os.close(taken.pop())
    return taken
