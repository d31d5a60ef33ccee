"""Requests to a process whose name has several addresses, of which some do not answer."""

import asyncio
import socket
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from baton.net.cluster_client import ClusterClient, NoAnswerError

DEAD, ALIVE = "127.0.0.2", "127.0.0.3"
TIMEOUT_S = 0.2
ANSWER_TIMEOUT_S = 2.0
"""Half of it is waited for the first of two addresses, the other one answers in the rest."""


@contextmanager
def no_answer_at(host):
    """A port of `host` whose listener's backlog is full: no connection to it is made."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.settimeout(0)
            each.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for each in waiting:
            each.close()


async def answer(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    writer.close()
    await writer.wait_closed()


async def post(port, addresses, timeout_s=TIMEOUT_S):
    """The answer of the process whose name has these addresses."""
    client = ClusterClient(f"http://gateways.test:{port}", None, None, max_answer_bytes=100)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    try:
        with patch.object(socket, "getaddrinfo", lambda *_, **__: found):
            return await client.post("/x", b"", timeout_s)
    finally:
        client.close()


def test_the_next_address_is_used_where_the_first_one_does_not_answer():
    async def scenario(port):
        async with await asyncio.start_server(answer, ALIVE, port):
            return await post(port, [DEAD, ALIVE], ANSWER_TIMEOUT_S)

    with no_answer_at(DEAD) as port:
        assert asyncio.run(scenario(port)) == b"ok"


@pytest.mark.parametrize("addresses", [[DEAD, ALIVE], [ALIVE, DEAD], [DEAD]])
def test_an_address_that_does_not_answer_is_named_and_not_taken_for_refused(addresses):
    with no_answer_at(DEAD) as port, pytest.raises(NoAnswerError, match=DEAD) as raised:
        asyncio.run(post(port, addresses))
    assert not raised.value.is_refused


def test_where_no_address_has_a_listener_the_request_is_refused():
    with socket.socket() as unused:
        unused.bind((ALIVE, 0))
        with pytest.raises(NoAnswerError) as raised:
            asyncio.run(post(unused.getsockname()[1], [ALIVE, ALIVE]))
    assert raised.value.is_refused
