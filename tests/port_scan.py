"""Every listener of running processes, and what it answers to who has no key."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.auth.credentials import Credentials
from baton.net.framing import MAGIC, MAX_HANDSHAKE_BYTES, PREFIX_BYTES, DialerHandshake
from tests.chaos.process_state import LISTEN, read_abstract_names, read_own_inodes
from tests.e2e_vllm.process_stats import find_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.testing.fleet import FleetProcess

ANSWER_WITHIN_S: Final = 4.0
"""A stranger has 2 s to prove who it is, 10 s for the head of a request."""
TLS_ALERT: Final = b"\x15\x03"
CLIENT_HELLO: Final = bytes.fromhex(
    "16030100710100006d0303" + "11" * 32 + "00000813021303130100ff0100003c"
    "000a00040002001d000d00080006080708040403002b0003020304003300260024001d0020" + "22" * 32
)
"""TLS 1.3 with X25519: a server that trusts everybody would answer with a ServerHello."""
PLAIN: Final = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Listener:
    """Of a process; `address` is a port, or the name of an abstract Unix socket."""

    process: str
    address: int | str

    def connect(self) -> socket.socket:
        if isinstance(self.address, int):
            return socket.create_connection(("127.0.0.1", self.address), ANSWER_WITHIN_S)
        unix = socket.socket(socket.AF_UNIX)
        unix.settimeout(ANSWER_WITHIN_S)
        unix.connect("\0" + self.address)
        return unix


def find_listeners(*processes: FleetProcess) -> list[Listener]:
    """Of these processes and all that they started."""
    found: set[Listener] = set()
    for process in processes:
        for pid in find_tree(process.pid):
            own = read_own_inodes(pid)
            for table in ("tcp", "tcp6"):
                lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
                for words in (line.split() for line in lines):
                    if words[3] == LISTEN and words[9] in own:
                        port = int(words[1].rpartition(":")[2], 16)
                        found.add(Listener(process.name, port))
            found |= {Listener(process.name, name) for name in read_abstract_names(pid)}
    return sorted(found, key=str)


def make_probes() -> Iterator[bytes]:
    """What a scanner sends, and what somebody who has read docs/wire does."""
    yield b""
    yield PLAIN
    yield CLIENT_HELLO
    yield os.urandom(256)
    for purpose in ("handoff", "tcp", "shared"):
        yield DialerHandshake(Credentials.generate(), purpose).opening()


def ask_stranger(listener: Listener, sent: bytes) -> bytes:
    """All that a listener answers before it closes the connection, or for a while."""
    answer, until = b"", time.monotonic() + ANSWER_WITHIN_S
    try:
        with listener.connect() as connection:
            connection.sendall(sent)
            while (left_s := until - time.monotonic()) > 0:
                connection.settimeout(left_s)
                received = connection.recv(65536)
                if not received:
                    break
                answer += received
    except OSError:  # reset, or it does not close an idle connection yet
        pass
    return answer


def is_refusal(sent: bytes, answer: bytes) -> bool:
    """Nothing, an alert, a 400; or to the opening of a link, who this is, and then nothing."""
    if not answer:
        return True
    is_short = len(answer) <= PREFIX_BYTES + MAX_HANDSHAKE_BYTES
    if sent == CLIENT_HELLO:  # the server's side of a handshake that asks for a certificate
        return answer[:2] in {TLS_ALERT, b"\x16\x03"} and is_short
    if MAGIC in sent:
        return answer[PREFIX_BYTES:].startswith(MAGIC) and is_short
    return answer.startswith((b"HTTP/1.1 400 ", TLS_ALERT))


def check_refusals(listeners: Sequence[Listener]) -> None:
    """All of them refuse all that a stranger sends."""
    asked = [(listener, sent) for sent in make_probes() for listener in listeners]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda each: ask_stranger(*each), asked)
    for (listener, sent), answer in zip(asked, answers, strict=True):
        assert is_refusal(sent, answer), (listener, sent, answer)
