"""Requests to a process whose name has several addresses, of which some do not answer."""

import asyncio
import socket
from contextlib import contextmanager

import pytest

from baton.net.cluster_client import ClusterClient, NoAnswerError

DEAD, ALIVE = "127.0.0.2", "127.0.0.3"
TIMEOUT_S = 0.2


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


async def post(port, addresses):
    """The answer of the process whose name has these addresses."""

    async def getaddrinfo(*_, **__):
        found = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*found, (address, port)) for address in addresses]

    asyncio.get_running_loop().getaddrinfo = getaddrinfo
    client = ClusterClient(f"http://gateways.test:{port}", None, None, max_answer_bytes=100)
    try:
        return await client.post("/x", b"", TIMEOUT_S)
    finally:
        client.close()


def test_the_next_address_is_used_where_the_first_one_does_not_answer():
    async def scenario(port):
        async with await asyncio.start_server(answer, ALIVE, port):
            return await post(port, [DEAD, ALIVE])

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
