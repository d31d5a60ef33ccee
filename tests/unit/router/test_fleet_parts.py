"""Parts of a fleet: the workers with room for a request, and those that have a lost one's model."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from baton.protocol.worker_http import Role, WorkerProtocol
from baton.router.fleet import Fleet, WorkerView
from tests.unit.router.test_round_robin import worker


def sized(name: str, role: Role, num_tokens: int) -> WorkerView:
    return replace(worker(name, role), max_context_tokens=num_tokens)


P = sized("p", Role.PREFILL, 256)
SMALL, LARGE = sized("small", Role.DECODE, 256), sized("large", Role.DECODE, 4096)
FLEET = Fleet.of([P, SMALL, LARGE])


def names(fleet: Fleet) -> list[str]:
    served = fleet.models["demo"]
    return [each.id for each in (*served.prefills, *served.decodes)]


def test_where_all_have_room_it_is_the_same_fleet() -> None:
    assert FLEET.models["demo"].least_context_tokens == 256
    assert FLEET.with_room("demo", 255) is FLEET


def test_workers_without_room_for_one_token_more_are_left_out() -> None:
    part = FLEET.with_room("demo", 256)
    assert names(part) == ["large"]
    assert part.models["demo"].is_part
    assert part.absent_prefills == ("p has room for 256 tokens",)


@pytest.mark.parametrize("num_tokens", [4096, inf])
def test_where_no_answer_could_come_from_none_is_left_out(num_tokens: float) -> None:
    assert FLEET.with_room("demo", num_tokens) is FLEET
    fleet = Fleet.of([sized("p", Role.PREFILL, 10_000), SMALL])
    assert fleet.with_room("demo", num_tokens) is fleet


@pytest.mark.parametrize(
    ("protocol", "fingerprint", "checkpoint", "is_same"),
    [
        ("baton", "f", "/v2", True),
        ("baton", "g", "/v1", False),
        ("vllm", "f", "/v2", True),
        pytest.param("vllm", "g", "/v1", True, id="vllm: KV is computed in another way"),
        pytest.param("vllm", "g", "", True, id="vllm: not known"),
        ("vllm", "g", "/v2", False),
    ],
)
def test_whose_tokens_are_the_same(
    protocol: WorkerProtocol, fingerprint: str, checkpoint: str, is_same: bool
) -> None:
    lost = replace(worker("lost", Role.DECODE, protocol=protocol), checkpoint="/v1")
    other = replace(lost, fingerprint=fingerprint, checkpoint=checkpoint)
    assert other.has_model_of(lost) == is_same
    assert names(Fleet.of([other]).like(lost, must_resume=True)) == ["lost"] * is_same
