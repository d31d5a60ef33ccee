"""Whether the process of a writer has ended, which proves that nothing of it lands any more."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from baton.clock import MachineClock
from baton.net.connection import EventReactor
from baton.transfer.grants import WriterId
from baton.transfer.peer_writes import AdmittedWriter, WriterConnection

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def reactor() -> Iterator[EventReactor[object]]:
    made: EventReactor[object] = EventReactor(MachineClock())
    yield made
    made.close()


def watch(reactor: EventReactor[object], pid: int, over: list[WriterId]) -> WriterConnection:
    connection = SimpleNamespace(is_open=False, close=lambda: None)
    ledger = SimpleNamespace(release=lambda _: None)
    writer = AdmittedWriter(WriterId(1), connection, None, ledger, reactor, over.append)
    return WriterConnection(writer, os.pidfd_open(pid))


def test_one_that_has_ended_is_over(reactor: EventReactor[object]) -> None:
    over: list[WriterId] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch(reactor, process.pid, over)
        reactor.poll()
        assert over == []
        process.kill()
    reactor.poll()
    assert over == [1]


def test_one_that_gets_the_descriptor_of_one_that_has_ended_is_not(
    reactor: EventReactor[object],
) -> None:
    """Both were ready in one look: the old one's connection was closed before its process."""
    over: list[WriterId] = []
    new: list[WriterConnection] = []
    (old, told), (attach, asked), (process, ended) = os.pipe(), os.pipe(), os.pipe()

    def close_the_old_one() -> None:
        for fd in (old, process):
            reactor.unwatch(fd)
            os.close(fd)
        new.append(watch(reactor, os.getpid(), over))

    def admit_the_new_one() -> None:
        os.read(attach, 1)
        new.append(watch(reactor, os.getpid(), over))

    reactor.watch(old, close_the_old_one)
    reactor.watch(attach, admit_the_new_one)
    reactor.watch(process, lambda: over.append(WriterId(0)))
    for fd in (told, asked, ended):
        os.write(fd, b"x")
    reactor.poll()
    assert process in {writer._process for writer in new}, "its number was not given again"
    assert over == []
    for writer in new:
        writer.close()
    for fd in (told, attach, asked, ended):
        os.close(fd)
