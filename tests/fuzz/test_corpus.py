"""Every kept input again, in bounded memory; and some new ones, as `make fuzz` makes millions."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.campaign import CORPUS, read_corpus, run_input
from tests.fuzz.mutation import deep
from tests.fuzz.targets import TARGETS

REPOSITORY = Path(__file__).parent.parent.parent
DECODERS = [name for name in TARGETS if not name.endswith("-peer")]
MAX_BYTES = 4 << 20
MAX_BYTES_PER_BYTE = 400
MAX_CORPUS_BYTES = 300 << 10
NUM_INPUTS = 4_000


@pytest.mark.parametrize("name", DECODERS)
def test_what_was_kept_is_answered_in_bounded_memory(name):
    """Not with what a length field announces: with what is there."""
    target = TARGETS[name]
    inputs = [*target.seeds, *read_corpus(target), *deep(target.form)]
    for data in inputs:
        run_input(target, data)  # what is made once and kept is no input's
    tracemalloc.start()
    try:
        for data in inputs:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            _, finding = run_input(target, data)
            _, peak = tracemalloc.get_traced_memory()
            assert finding is None, finding.what
            assert peak - before < MAX_BYTES + MAX_BYTES_PER_BYTE * len(data), data
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [name for name in TARGETS if name.endswith("-peer")])
def test_lies_that_were_kept_change_nothing(name):
    target = TARGETS[name]
    for data in (*target.seeds, *read_corpus(target)):
        _, finding = run_input(target, data)
        assert finding is None, finding.what


def test_kept_inputs_are_few_and_each_has_its_target():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in files) < MAX_CORPUS_BYTES


def test_new_inputs_find_nothing(tmp_path):
    """A process of its own: its memory is bounded."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--count", str(NUM_INPUTS), "--jobs", "1"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 findings" in ran.stdout
