"""Where few tests failed, `make test` runs these again; what really fails is not hidden."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/run_tests.py"
AGAIN = "failed beside other tests and run again"
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert 0\n"
FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("text", ["a b", "c::d[e]"])
def test_fails_once(text):
    runs = pathlib.Path(f"runs of {len(text)}")
    with runs.open("a") as file:
        file.write("x")
    assert runs.read_text() != "x"
"""
FAILS_AT_THE_END = """
import pathlib, pytest
@pytest.fixture(scope="module")
def shared():
    yield
    assert pathlib.Path("ended").exists(), pathlib.Path("ended").touch()
def test_shares(shared): pass
"""
MANY_FAIL = """
import pytest
@pytest.mark.parametrize("number", range(11))
def test_fails(number): assert 0
"""
CRASHES_ONCE = """
import os, pathlib
def test_crashes():
    if not pathlib.Path("crashed").exists():
        pathlib.Path("crashed").touch()
        os._exit(1)
"""
INTERRUPTED = "def test_is_interrupted(): raise KeyboardInterrupt\n"
ALONE, BESIDE = ("-n", "0"), ("-n", "2", "--dist", "loadscope")


def run(folder, *arguments):
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, str(SCRIPT), "-q", "-p", "xdist.plugin", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_fails_once_passes_and_is_named(tmp_path):
    (tmp_path / "test_it.py").write_text(PASSES + FAILS_ONCE, "utf-8")
    ended = run(tmp_path, *BESIDE, "--junitxml=report.xml", "test_it.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, _, second = ended.stdout.partition(AGAIN)
    assert "2 failed, 1 passed" in first
    for text in ("a b", "c::d[e]"):
        assert f"\n  test_it.py::test_fails_once[{text}]\n" in second
    assert "2 passed" in second.splitlines()[-1]
    assert [(tmp_path / f"runs of {length}").read_text() for length in (3, 7)] == ["xx", "xx"]
    assert (tmp_path / "report.xml").read_text("utf-8").count("<testcase ") == 3, "the first run's"


def test_what_fails_twice_fails(tmp_path):
    (tmp_path / "test_it.py").write_text(PASSES + FAILS + FAILS_ONCE, "utf-8")
    ended = run(tmp_path, *ALONE)
    assert ended.returncode == 1
    assert "1 failed, 2 passed" in ended.stdout.partition(AGAIN)[2].splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "arguments", "status"),
    [
        pytest.param(PASSES, ALONE, 0, id="all pass"),
        pytest.param(MANY_FAIL, ALONE, 1, id="more than ten fail"),
        pytest.param(FAILS_ONCE, (*ALONE, "-x"), 1, id="not all ran"),
        pytest.param(FAILS_ONCE, (*BESIDE, "-x"), 2, id="not all ran beside others"),
        pytest.param(FAILS_ONCE + INTERRUPTED, ALONE, 2, id="interrupted"),
        pytest.param("import nothing_of_this_name", ALONE, 2, id="cannot be collected"),
        pytest.param(FAILS_AT_THE_END, ALONE, 1, id="a shared fixture fails as it ends"),
        pytest.param(CRASHES_ONCE, BESIDE, 1, id="a test process crashes"),
        pytest.param(PASSES, ("--no-such-option",), 4, id="wrong arguments"),
        pytest.param("", ALONE, 5, id="no tests"),
    ],
)
def test_no_second_run_that_could_hide_something(tmp_path, source, arguments, status):
    (tmp_path / "test_it.py").write_text(source, "utf-8")
    ended = run(tmp_path, *arguments)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert AGAIN not in ended.stdout


def test_no_second_run_where_a_file_beside_others_was_not_collected(tmp_path):
    """xdist runs what the other files have, and that alone would pass the second time."""
    (tmp_path / "test_it.py").write_text(PASSES + FAILS_ONCE, "utf-8")
    (tmp_path / "test_other.py").write_text("import nothing_of_this_name", "utf-8")
    ended = run(tmp_path, *BESIDE)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert AGAIN not in ended.stdout
