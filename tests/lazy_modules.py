"""Modules that the first test that needs them imports, and not the collection of all tests.

To import vLLM takes six seconds of processor time, `openai` one and a half, and each process of
xdist collects all tests.
"""

from __future__ import annotations

import importlib.util
import warnings
from importlib import import_module
from typing import Any

import pytest


def skip_without_vllm() -> None:
    """Skip the module that is being collected where vLLM is not installed; it is not imported."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make install ENGINE=vllm", allow_module_level=True)


class LazyModule:
    """Has what the module has, but for private names: pytest looks for some in every module.

    What vLLM and torch warn of as they load is not ours to repair.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(import_module(self._name), attribute)


openai = LazyModule("openai")
