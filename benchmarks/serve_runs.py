"""`baton bench serve` as a part of other benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def run_serve(url: str, *options: str) -> dict:
    """The report of one run. Requests that failed are counted in its figures, and end nothing.

    Raises:
        SystemExit: it did not begin, stopped early, or no request was answered; with the cause.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "baton.cli", "bench", "serve", "--url", url, *options]
        command += ["--output", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or not path.exists():  # 1: a request failed, or was cut
            raise SystemExit(f"{url}: baton bench serve failed: {done.stderr[-2000:]}")
        report = json.loads(path.read_bytes())
    if report["is_partial"]:
        raise SystemExit(f"{url}: baton bench serve stopped: {report['stopped']}")
    if not report["figures"]["num_complete"]:
        examples = [each["example"] for each in report["figures"]["failures"]]
        raise SystemExit(f"{url}: no request was answered: {'; '.join(examples)}")
    return report
