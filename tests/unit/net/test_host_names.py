"""Lookups of host names, with a resolver that hangs, fails and answers again."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter

import pytest

from baton.net import host_names
from baton.net.host_names import HostName, merge_errors, name_of

GONE = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class Resolver:
    """Answers at once, unless a name `hangs`; `answers` are addresses or an error, by name."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | Exception] = {}
        self.hangs: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.goes_on = threading.Event()

    def getaddrinfo(self, host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        self.asked[host] += 1
        if host in self.hangs:
            self.goes_on.wait(30)
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in answer]


@pytest.fixture
def resolver(monkeypatch):
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(host_names, "LATE_S", 30.0)
    yield made
    made.goes_on.set()


def test_names_that_hang_delay_no_other_and_take_one_thread_each(resolver):
    bad = [HostName(f"bad-{number}.test") for number in range(40)]
    resolver.hangs = {f"bad-{number}.test" for number in range(40)}
    names = (*resolver.hangs, "good.test")
    resolver.answers = {name: ["10.0.0.1", "10.0.0.1"] for name in names}

    async def main():
        for _ in range(3):
            for each in bad:
                with pytest.raises(OSError, match="no answer of the resolver for bad-"):
                    await each.look_up(0.0001)
        assert await HostName("good.test").look_up(30) == ("10.0.0.1",)
        assert set(resolver.asked.values()) == {1}
        resolver.goes_on.set()
        assert await bad[0].look_up(30) == ("10.0.0.1",)

    asyncio.run(main())


def test_the_last_addresses_are_used_while_a_lookup_is_late_or_fails(resolver, monkeypatch):
    resolver.answers = {"w.test": ["10.0.0.1"]}
    name = HostName("w.test")

    async def main():
        assert await name.find(30, may_be_old=True) == (("10.0.0.1",), [])
        resolver.answers["w.test"] = GONE
        found, (why,) = await name.find(30, may_be_old=True)
        assert (found, why.strerror) == (("10.0.0.1",), GONE.strerror)
        with pytest.raises(socket.gaierror, match="not known"):
            await name.find(30, may_be_old=False)
        resolver.hangs, resolver.answers["w.test"] = {"w.test"}, ["10.0.0.2"]
        monkeypatch.setattr(host_names, "LATE_S", 0.01)
        for _ in range(3):
            found, (why,) = await name.find(30, may_be_old=True)
            assert (found, str(why)) == (("10.0.0.1",), "no answer of the resolver for w.test")
        assert resolver.asked["w.test"] == 4
        resolver.goes_on.set()
        async with asyncio.timeout(30):
            while await name.find(30, may_be_old=True) != (("10.0.0.2",), []):
                await asyncio.sleep(0.001)

    asyncio.run(main())


@pytest.mark.parametrize("error", [GONE, UnicodeError("label too long"), ValueError("null")])
def test_a_name_that_was_never_found_is_an_error(resolver, error):
    resolver.answers = {"w.test": error}
    with pytest.raises(OSError, match=r"not known|cannot be looked up"):
        asyncio.run(HostName("w.test").find(30, may_be_old=True))


def test_a_lookup_may_outlive_its_event_loop(resolver, caplog):
    resolver.hangs, resolver.answers = {"w.test"}, {"w.test": ["10.0.0.1"]}
    name = HostName("w.test")

    async def leave():
        waiting = asyncio.ensure_future(name.look_up())
        with pytest.raises(OSError, match="no answer"):
            await name.look_up(0.001)
        assert not waiting.done()

    asyncio.run(leave())
    resolver.goes_on.set()
    assert asyncio.run(name.look_up(30)) == ("10.0.0.1",)
    assert not caplog.records


def test_an_address_is_no_name_and_users_of_a_name_share_it():
    assert name_of("10.0.0.1") is name_of("2001:db8::1") is None
    assert name_of("w.test") is name_of("w.test") is not None


def test_refused_is_only_what_all_current_addresses_refuse():
    refused, late = ConnectionRefusedError(111, "refused"), OSError("late")
    assert merge_errors([refused, refused]) is refused
    assert str(merge_errors([late, refused])) == "late; [Errno 111] refused"
    assert not isinstance(merge_errors([late, refused]), ConnectionRefusedError)
    assert merge_errors([late]) is late
