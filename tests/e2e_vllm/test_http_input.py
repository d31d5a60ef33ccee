"""What is no request gets a 4xx in OpenAI's form from a fleet of vLLM servers, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.http_input import check_bad_requests, explore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e_vllm.cluster import VllmCluster

pytestmark = pytest.mark.vllm


def test_bad_requests_are_refused(cluster: VllmCluster) -> None:
    check_bad_requests(cluster.gateway.url)


@pytest.mark.parametrize(
    "phases", ["fuzzing", pytest.param("examples,coverage,stateful", marks=pytest.mark.every)]
)
def test_it_serves_what_it_describes(cluster: VllmCluster, tmp_path: Path, phases: str) -> None:
    """Not checked: that all that is not allowed is refused. vLLM takes "1" for a number.

    All values of every field, `tests/abuse/test_http_input.py` sends to such a gateway.
    """
    explore(
        cluster.gateway.url, tmp_path,
        "--exclude-checks", "positive_data_acceptance,negative_data_rejection", "-n", "6",
        "--phases", phases,
        model={
            "model": {"const": "demo"},
            "max_tokens": {"enum": [1, 2]},
            "max_completion_tokens": {"enum": [1, 2]},
        },
        required=("max_tokens",),  # without it a chat's answer fills the context
    )  # fmt: skip
