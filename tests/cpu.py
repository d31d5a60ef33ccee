"""What a test needs of the processor that it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

FLAGS = set(Path("/proc/cpuinfo").read_text().split())
needs_fp8 = pytest.mark.skipif(
    not FLAGS & {"avx512f", "amx_tile"},
    reason="vLLM's FP8 KV cache on CPUs needs AVX-512 or AMX, which this CPU lacks",
)
