"""Ports for servers that bind them some time after they were chosen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10_000
MAX_ATTEMPTS = 100


def find_free_port() -> int:
    """A port of 127.0.0.1 that is free, and that the kernel gives to no connection meanwhile.

    A server of vLLM binds its port half a minute after it was chosen. One of the ports that
    connections get was taken by then in one run of the suite.
    """
    return find_free_ports(1)


def find_free_ports(num: int) -> int:
    """The first of so many such ports in a row."""
    first_ephemeral = int(RANGE.read_text("ascii").split()[0])
    chance = random.SystemRandom()
    for _ in range(MAX_ATTEMPTS):
        first = chance.randrange(LOWEST_PORT, first_ephemeral - num)
        try:
            with ExitStack() as opened:
                for port in range(first, first + num):
                    opened.enter_context(socket.create_server(("127.0.0.1", port)))
                return first
        except OSError:
            continue
    raise AssertionError(f"no {num} ports between {LOWEST_PORT} and {first_ephemeral} are free")
