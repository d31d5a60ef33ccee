"""The house of vLLM servers that these tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e_vllm.house import House, Street


@pytest.fixture(scope="session")
def street(vllm_street: Street) -> Street:
    return vllm_street


@pytest.fixture(scope="session")
def house(vllm_house: House) -> House:
    return vllm_house
