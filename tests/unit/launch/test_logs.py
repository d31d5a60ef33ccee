"""Log files of bounded size, and reading them."""

import asyncio
import os
import resource
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.launch.logs import LogFile, LogFolder, log_names, read_lines


async def read(path, num_lines):
    return [line async for line in read_lines(path, num_lines, follow=False)]


@given(st.lists(st.text(st.characters(categories=["L", "N"]), max_size=30), max_size=40))
def test_the_last_lines_are_kept_in_bounded_space(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("logs") / "w.log"
    log = LogFile(path, max_bytes=100)
    for line in lines:
        log.write_line(line)
    log.close()
    files = list(path.parent.iterdir())
    assert sum(file.stat().st_size for file in files) <= 2 * max(100, 121)
    found = asyncio.run(read(path, 1000))
    assert found == lines[len(lines) - len(found) :]
    size = len("\n".join(lines).encode())
    assert size > 100 or found == lines  # nothing is lost before the first file is full
    assert asyncio.run(read(path, 3)) == found[-3:]
    assert asyncio.run(read(path, 0)) == []


def test_following_survives_rotation(tmp_path):
    path = tmp_path / "w.log"
    log = LogFile(path, max_bytes=100)
    log.write_line("before")

    async def follow():
        async with aclosing(read_lines(path, 1, follow=True)) as lines, asyncio.timeout(30):
            assert await anext(lines) == "before"
            for number in range(30):
                log.write_line(f"line {number}")
                assert await anext(lines) == f"line {number}"

    asyncio.run(follow())
    assert (tmp_path / "w.log.1").exists()


def test_a_rotation_that_failed_is_made_up_for(tmp_path):
    path = tmp_path / "w.log"
    log = LogFile(path, max_bytes=100)
    log.write_line("a" * 90)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no file can be opened
    try:
        log.write_line("lost" * 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    log.write_line("line" * 5)
    log.close()
    assert path.read_text() == "line" * 5 + "\n"


def test_logs_of_workers_that_are_gone_do_not_pile_up(tmp_path):
    logs = LogFolder(tmp_path)
    logs.write_line("launcher", "start")
    for number in range(300):
        logs.write_line(f"decode-{number}", "line")
    logs.write_line("launcher", "end")
    names = log_names(tmp_path)
    assert len(names) <= 130
    assert "decode-299" in names
    assert (tmp_path / "launcher.log").read_text() == "start\nend\n"


def test_a_disk_that_is_full_costs_lines_alone(tmp_path):
    """Whoever does not read a process's lines blocks it: nothing may end the reading."""
    full, gone = tmp_path / "full", tmp_path / "gone"
    full.mkdir()
    (full / "w.log").symlink_to("/dev/full")
    log = LogFile(full / "w.log")
    with pytest.raises(OSError, match="No space left"):
        os.write(log._fd, b"line")
    log.write_line("line")
    log.close()
    logs = LogFolder(gone)  # in which no file can be made
    logs.write_line("w", "line")
    assert log_names(gone) == []
