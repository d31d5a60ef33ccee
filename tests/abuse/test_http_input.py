"""What is no request gets a 4xx in OpenAI's form from a fleet of the embedded engine."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import pytest

from baton.engines.transformers.random_model import RandomModelSpec, make_random_model
from baton.testing.fleet import Fleet
from tests.http_input import check_bad_requests, explore
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPEC = RandomModelSpec(  # what is answered does not matter: a token takes as little as it can
    num_layers=1,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    max_context_tokens=8,
    dtype="float32",
)
ENGINE: dict[str, object] = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.num_blocks": 128,
    "engine.max_context_tokens": 8,  # answers without `max_tokens` are short
}


@pytest.fixture(scope="module")
def gateway_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=secrets.token_hex(32))
    model = tmp_path_factory.mktemp("model") / "demo"
    make_random_model(model, SPEC)
    engine = ENGINE | {"worker.model": str(model), "worker.served_model_name": "demo"}
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        prefill = fleet.start_worker("prefill", "prefill", engine)
        decode = fleet.start_worker("decode", "decode", engine)
        prefill.wait_ready()
        decode.wait_ready()
        yield fleet.start_gateway([prefill], [decode]).url
        fleet.stop()


def test_bad_requests_are_refused(gateway_url: str) -> None:
    check_bad_requests(gateway_url)


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.every)])
def test_it_serves_what_it_describes(gateway_url: str, tmp_path: Path, is_whole: bool) -> None:
    explore(
        gateway_url, tmp_path, "--exclude-checks", "positive_data_acceptance", "-n", "8",
        model={"model": {"const": "demo"}}, is_whole=is_whole,
    )  # fmt: skip
