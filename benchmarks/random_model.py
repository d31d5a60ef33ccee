"""Random models for benchmarks: their sizes count, not what they answer."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def make_model(folder: Path, sizes: Mapping[str, int], dtype: str = "float32") -> Path:
    """Make a random Llama in `folder`; `sizes` are options of `baton model make --random`."""
    path = folder / "model"
    options = {"context": 8192} | dict(sizes)
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "baton.cli", "model", "make", "--random", *words]
    command += ["--dtype", dtype, "--out", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path
