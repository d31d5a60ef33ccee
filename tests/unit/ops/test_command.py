"""`baton doctor`'s help, and what the doctor's own process imports."""

import json
import subprocess
import sys

HEAVY = {"torch", "transformers", "numpy", "aiohttp", "uvicorn", "uvloop"}


def modules_after(code):
    """Names of the modules that a fresh interpreter has after running `code`."""
    code += "\nimport json, sys\nprint('\\0' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.rpartition("\0")[2]))


def test_help_imports_nothing_heavy():
    loaded = modules_after("from baton.cli.main import run\nrun(['doctor', '--help'])")
    assert not (HEAVY | {"prometheus_client"}) & loaded
    assert "baton.cli.doctor" in loaded


def test_the_process_that_forks_has_no_library_that_starts_threads():
    code = (
        "from baton.cli.main import run\n"
        "run(['doctor', '--gateway', 'http://127.0.0.1:1'])\n"
        "import os\nassert len(os.listdir('/proc/self/task')) == 1"
    )
    assert not HEAVY & modules_after(code)
