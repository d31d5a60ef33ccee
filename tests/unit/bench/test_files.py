"""Results are written whole, or elsewhere, or it is said; what cannot be is refused at once."""

from pathlib import Path

import msgspec
import pytest

from baton.bench import files
from baton.bench.files import LineFile, NotSavedError, check_writable, save_result
from baton.errors import ConfigError


class Thing(msgspec.Struct):
    number: int
    text: str = ""


def test_a_result_replaces_an_older_one(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    save_result(path, Thing(1))
    assert msgspec.json.decode(path.read_bytes(), type=Thing) == Thing(1)
    assert [each.name for each in tmp_path.iterdir()] == ["r.json"]


def test_a_full_disk_leaves_the_old_result_and_saves_the_new_one_elsewhere(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(files.tempfile, "tempdir", str(elsewhere))
    with pytest.raises(NotSavedError, match=r"No space left.*instead"):
        save_result(Path("/dev/full"), Thing(2))
    (saved,) = elsewhere.iterdir()
    assert msgspec.json.decode(saved.read_bytes(), type=Thing) == Thing(2)


def test_no_space_anywhere_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "nothing"))
    with pytest.raises(NotSavedError, match="free some space"):
        save_result(Path("/dev/full"), Thing(3))


def test_lines_stop_at_the_first_error_and_it_is_kept():
    lines = LineFile(Path("/dev/full"))
    lines.append(Thing(1))
    lines.append(Thing(2))
    lines.close()
    assert "No space left" in lines.problem


def test_lines(tmp_path):
    lines = LineFile(tmp_path / "l.jsonl")
    lines.append(Thing(1))
    lines.append(Thing(2))
    lines.close()
    lines.close()
    assert (tmp_path / "l.jsonl").read_bytes().count(b"\n") == 2
    assert lines.problem is None


def test_older_lines_stay_until_there_is_a_first_one(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_text("of another run\n" * 9)
    LineFile(path).close()  # as of a server that is not there
    assert path.read_text().startswith("of another run")
    lines = LineFile(path)
    lines.append(Thing(1))
    lines.append(Thing(2))
    lines.close()
    read = [msgspec.json.decode(line, type=Thing) for line in path.read_bytes().splitlines()]
    assert (read, lines.problem) == ([Thing(1), Thing(2)], None)


def test_what_cannot_be_written_is_refused_before(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        with pytest.raises(ConfigError):
            check_writable(path)
        with pytest.raises(ConfigError):
            LineFile(path)
