"""All of this needs a CUDA GPU: `pytest tests/gpu`. Elsewhere it is skipped, with the reason."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    why = f"needs a CUDA GPU (torch {torch.__version__} sees none)"
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=why))
