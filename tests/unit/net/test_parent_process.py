"""A child that is started by a parent that has ended does not run."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

from baton.net.parent_process import exit_with_parent


@pytest.mark.parametrize("is_there", [True, False])
def test_a_child_runs_only_while_its_parent_is_there(is_there):
    parent = os.getpid() if is_there else os.getppid()
    child = subprocess.run(
        [sys.executable, "-c", "print('ran')"],
        capture_output=True,
        preexec_fn=partial(exit_with_parent, parent),
        check=False,
    )
    assert (child.returncode, child.stdout) == ((0, b"ran\n") if is_there else (1, b""))
