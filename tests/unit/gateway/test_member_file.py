"""Source `file`: what of a file is taken, and that anything else changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest

from baton.clock import MachineClock
from baton.errors import ConfigError, ProtocolError
from baton.gateway.members import file as file_source
from baton.gateway.members.file import FileSource, read_addresses
from baton.gateway.members.interface import build_source
from baton.gateway.options import WorkerAddress
from baton.protocol.members import MAX_MEMBERS_FILE_BYTES, Member, MembersFile, encode_members
from baton.protocol.worker_http import Role

URL = "https://10.0.0.2:8101"
ONE = {"version": 1, "workers": [{"url": URL, "role": "prefill"}]}


def text_of(**changes: object) -> bytes:
    return json.dumps({**ONE, **changes}).encode()


def test_what_a_launcher_writes_is_what_a_gateway_reads():
    members = (Member(URL, Role.PREFILL), Member("https://h:1", Role.BOTH, draining=True))
    content = encode_members(MembersFile(version=1, workers=members))
    assert read_addresses(content) == {
        WorkerAddress(URL, Role.PREFILL),
        WorkerAddress("https://h:1", Role.BOTH, draining=True),
    }


def test_fields_of_a_newer_writer_are_ignored():
    workers = [{"url": URL, "role": "decode", "weight": 3}]
    assert read_addresses(text_of(workers=workers, by="baton 9")) == {
        WorkerAddress(URL, Role.DECODE)
    }


def test_a_file_that_lists_no_worker_is_a_list_of_none():
    assert read_addresses(text_of(workers=[])) == frozenset()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no members file"),
        (b"{}", "missing required field `version`"),
        (b'{"version": 1}', "missing required field `workers`"),
        (text_of(version=2), "Invalid enum value 2"),
        (text_of()[:-9], "no members file"),
        (b"\xff\xfe", "no members file"),
        (b"[" * 100_000, "no members file"),
        (text_of(workers=[{"url": URL, "role": "cook"}]), "no members file"),
        (text_of(workers=[{"url": "", "role": "both"}]), "no members file"),
        (
            text_of(workers=[{"url": f"{URL}{slash}", "role": "both"} for slash in ("", "/")]),
            "twice",
        ),
        (text_of(workers=[{"url": "https://h:1/v1", "role": "both"}]), "not a worker's address"),
        (text_of(workers=[{"url": "https://h:99999", "role": "both"}]), "not a worker's address"),
        (text_of(workers=[{"url": "https://[h", "role": "both"}]), "not a worker's address"),
        (text_of() + b" " * MAX_MEMBERS_FILE_BYTES, "more than 1048576 bytes"),
    ],
)
def test_anything_else_is_refused_whole(content, why):
    with pytest.raises((ProtocolError, ConfigError), match=why):
        read_addresses(content)


@pytest.mark.parametrize("argument", ["", "members.json", "../members.json"])
def test_the_path_is_absolute(argument):
    with pytest.raises(ConfigError, match="no absolute path"):
        build_source(f"file:{argument}", MachineClock(), 2.0, "control")


def replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.chmod(0o644)
    Path(draft).replace(path)


def test_a_file_that_cannot_be_used_keeps_the_list_and_is_logged_once(
    tmp_path, monkeypatch, caplog
):
    """Each fault is seen: its error counts before the next one begins."""
    monkeypatch.setattr(file_source, "POLL_S", 0.005)
    path = tmp_path / "members.json"

    async def main() -> None:
        named = build_source(f"file:{path}", MachineClock(), 2.0, "control")
        status = named.status
        assert isinstance(named.source, FileSource)
        yielded = []

        async def follow() -> None:
            async with aclosing(named.source.watch()) as lists:
                async for addresses in lists:
                    urls = {each.url for each in addresses}
                    yielded.append(urls)

        async def until(condition) -> None:
            async with asyncio.timeout(30):
                while not condition():
                    await asyncio.sleep(0.002)

        async def until_refused(why: str) -> None:
            num = status.num_errors
            await until(lambda: status.num_errors >= num + 3)
            assert why in status.problem

        following = asyncio.create_task(follow())
        await until_refused("No such file or directory")
        assert status.age_s is None
        replace(path, text_of())
        await until(lambda: yielded == [{URL}])
        assert status.problem is None

        for content, why in [
            (text_of()[:20], "no members file"),
            (b"", "no members file"),
            (b" " * (MAX_MEMBERS_FILE_BYTES + 1), "more than"),
        ]:
            replace(path, content)
            await until_refused(why)
        path.unlink()
        await until_refused("No such file")
        os.mkfifo(path)
        await until_refused("no regular file")
        path.unlink()
        path.mkdir()
        await until_refused("no regular file")
        path.rmdir()
        replace(path, text_of(workers=[]))
        path.chmod(0o666)
        await until_refused("chmod o-w")
        assert yielded == [{URL}]

        path.chmod(0o644)
        await until(lambda: yielded == [{URL}, set()])
        # In place, with the same size and times.
        replace(path, text_of(workers=[{"url": "https://a:1", "role": "both"}]))
        await until(lambda: yielded[2:] == [{"https://a:1"}])
        times = path.stat()
        with path.open("r+b") as opened:
            opened.write(text_of(workers=[{"url": "https://b:1", "role": "both"}]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        await until(lambda: yielded[3:] == [{"https://b:1"}])
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    with caplog.at_level(logging.INFO, logger="baton.gateway.members"):
        asyncio.run(main())
    logged = [record.getMessage() for record in caplog.records]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert all(one != other for one, other in pairwise(warnings)), "each problem once"
    assert 5 <= len(warnings) < 12
    assert sum("can be read again" in text for text in logged) == 2


def test_a_file_that_hangs_takes_one_thread(tmp_path, monkeypatch):
    """As on a server that is away: the list before stays, and reading is not begun again."""
    monkeypatch.setattr(file_source, "POLL_S", 0.005)
    monkeypatch.setattr(file_source, "READ_TIMEOUT_S", 0.02)

    async def main() -> None:
        named = build_source(f"file:{tmp_path}/members.json", MachineClock(), 2.0, "control")
        started, hanging = [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def read(path: Path) -> bytes:
            started.append(path)
            asyncio.run_coroutine_threadsafe(hanging.wait(), loop).result(30)
            return text_of()

        monkeypatch.setattr(file_source, "read_bounded", read)
        async with aclosing(named.source.watch()) as lists:
            first = asyncio.ensure_future(anext(lists))
            async with asyncio.timeout(30):
                while named.status.num_errors < 3:
                    await asyncio.sleep(0.002)
            assert "takes more than 0.02 s" in named.status.problem
            assert len(started) == 1
            hanging.set()
            assert {each.url for each in await first} == {URL}

    asyncio.run(main())
