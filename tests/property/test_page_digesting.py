"""sum128 of runs of bytes: torch's operations and Triton's kernel, against Python's integers."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.property.page_digesting import check_torch


def test_torchs_own_operations():
    check_torch()


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (pip install triton)",
)
def test_the_kernel_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "tests.property.page_digesting", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "digested" in done.stdout
