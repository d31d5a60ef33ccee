"""Source `dns`: the addresses of a name, through answers that are empty, partial, late or wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import aclosing

import pytest

from baton.clock import MachineClock
from baton.errors import ConfigError
from baton.gateway.members import dns
from baton.gateway.members.dns import MISSES, DnsSource, look_up
from baton.gateway.members.interface import SourceSetup, SourceStatus, build_source
from baton.gateway.options import WorkerAddress
from baton.protocol.members import MAX_MEMBERS
from baton.protocol.worker_http import Role

NAME = "dns:decode=workers.example:8100"


def setup(text: str = NAME) -> SourceSetup:
    clock = MachineClock()
    argument = text.partition(":")[2]
    return SourceSetup(argument, SourceStatus(text, clock), 0.001, "control")


@pytest.mark.parametrize(
    "argument",
    [
        "",
        "workers.example:8100",
        "decode=workers.example",
        "decode=workers.example:0",
        "decode=workers.example:99999",
        "cook=workers.example:8100",
        "decode=:8100",
        "decode=a b:1",
        f"decode={'a' * 64}.example:1",
        f"decode={'a.' * 130}b:1",
        "decode=https://h:1",
    ],
)
def test_the_argument_is_a_role_a_name_and_a_port(argument):
    with pytest.raises(ConfigError, match="is not dns:ROLE=HOST:PORT"):
        build_source(f"dns:{argument}", MachineClock(), 2.0, "control")


def test_without_tls_dns_is_not_believed():
    """It would decide where the cluster's bearer token is sent."""
    with pytest.raises(ConfigError, match=r'security\.tls is "off"'):
        build_source(NAME, MachineClock(), 2.0, "off")


def follow(
    *answers: frozenset[str] | OSError, text: str = NAME
) -> tuple[list[set[str]], SourceStatus]:
    """What a source yields of these answers, the last of which is repeated until it is settled."""
    given = setup(text)
    left = list(answers)

    async def answer(host: str) -> frozenset[str]:
        assert host == "workers.example"
        if not left:
            await asyncio.Event().wait()
        found = left.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    async def main() -> list[set[str]]:
        source, yielded = DnsSource(given, answer), []

        async def read() -> None:
            async with aclosing(source.watch()) as lists:
                async for addresses in lists:
                    assert {each.role for each in addresses} == {Role.DECODE}
                    yielded.append({each.url for each in addresses})

        reading = asyncio.create_task(read())
        async with asyncio.timeout(30):
            while left:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return yielded

    return asyncio.run(main()), given.status


A, B = frozenset({"10.0.0.1"}), frozenset({"10.0.0.2"})
URL_A, URL_B = "https://10.0.0.1:8100", "https://10.0.0.2:8100"
GONE = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_each_address_is_a_worker_and_a_change_is_yielded_once():
    yielded, status = follow(A, A, A | B, A | B)
    assert yielded == [{URL_A}, {URL_A, URL_B}]
    assert (status.num_errors, status.problem) == (0, None)


def test_an_address_of_ipv6_is_written_in_brackets():
    yielded, _ = follow(frozenset({"2001:db8::1"}))
    assert yielded == [{"https://[2001:db8::1]:8100"}]


@pytest.mark.parametrize(
    "bad",
    [GONE, frozenset(), frozenset(f"10.0.{n >> 8}.{n & 255}" for n in range(MAX_MEMBERS + 1))],
)
def test_an_answer_that_cannot_be_used_changes_nothing(bad):
    yielded, status = follow(A, *[bad] * 10)
    assert yielded == [{URL_A}]
    assert status.num_errors == 10
    assert "workers.example" in status.problem
    yielded, status = follow(A, *[bad] * 10, A, B | A)
    assert yielded == [{URL_A}, {URL_A, URL_B}]
    assert status.problem is None


def test_an_address_leaves_once_several_answers_in_a_row_lack_it():
    partial = [A, B] * 5
    yielded, _ = follow(A | B, *partial)
    assert yielded == [{URL_A, URL_B}], "answers with a part of the addresses"
    yielded, _ = follow(A | B, *[A] * (MISSES - 1), A | B, *[A] * (MISSES - 1))
    assert yielded == [{URL_A, URL_B}]
    yielded, _ = follow(A | B, *[A] * MISSES)
    assert yielded == [{URL_A, URL_B}, {URL_A}]


def test_a_resolver_that_hangs_is_asked_once(monkeypatch):
    monkeypatch.setattr(dns, "LOOK_UP_TIMEOUT_S", 0.01)
    given = setup()
    asked, answers = [], threading.Event()

    def getaddrinfo(host, *_, **__):
        asked.append(host)
        answers.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def main() -> None:
        async with aclosing(DnsSource(given).watch()) as lists:
            first = asyncio.ensure_future(anext(lists))
            async with asyncio.timeout(30):
                while given.status.num_errors < 3:
                    await asyncio.sleep(0.002)
            assert "no answer for workers.example in 0.01 s" in given.status.problem
            assert asked == ["workers.example"]
            answers.set()
            assert await first == {WorkerAddress(URL_A, Role.DECODE)}

    try:
        asyncio.run(main())
    finally:
        answers.set()


def test_the_systems_resolver_is_asked():
    async def main() -> None:
        assert "127.0.0.1" in await look_up("localhost")

    asyncio.run(main())
