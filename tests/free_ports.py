"""Ports for servers that bind them some time after they were chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10_000
MAX_ATTEMPTS = 100


def find_free_port() -> int:
    """A port of 127.0.0.1 that is free, and that the kernel gives to no connection meanwhile.

    A server of vLLM binds its port half a minute after it was chosen. One of the ports that
    connections get was taken by then in one run of the suite.
    """
    first_ephemeral = int(RANGE.read_text("ascii").split()[0])
    chance = random.SystemRandom()
    for _ in range(MAX_ATTEMPTS):
        port = chance.randrange(LOWEST_PORT, first_ephemeral)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError(f"no port between {LOWEST_PORT} and {first_ephemeral} is free")
