from __future__ import annotations

import json

import msgspec
import pytest

from baton.engines.vllm.identity import (
    Identity,
    ModelFacts,
    RankFacts,
    compute_epoch,
    describe_worker,
)
from baton.errors import ProtocolError
from baton.gateway.options import WorkerAddress
from baton.gateway.worker_info import read_info, why_not_used
from baton.gateway.workers import Worker, worker_view
from baton.ids import WorkerId
from baton.kv.layout import KVLayout
from baton.protocol.worker_http import MAX_RANKS, Role, WorkerInfo
from baton.router.health import DEFAULT_HEALTH

VLLM = {
    "worker": "vllm-d",
    "epoch": "e" * 32,
    "role": "decode",
    "served_model_name": "demo",
    "fingerprint": "f",
    "max_context_tokens": 4096,
    "handoff_address": "10.0.0.5:7000",
    "transports": ["tcp"],
    "version": "0.1.0",
    "protocol": "vllm",
    "engine": "vllm 0.32.0",
    "control_urls": ["http://10.0.0.5:7100"],
    "kv_events": {"endpoint": "ipc:///run/x", "replay_endpoint": None, "topic": ""},
}


def info(**changes: object) -> WorkerInfo:
    return read_info(json.dumps({**VLLM, **changes}).encode())


def ranks(number: int) -> list[str]:
    return [f"10.0.0.5:{7000 + i}" for i in range(number)]


def controls(number: int) -> list[str]:
    return [f"http://10.0.0.5:{7100 + i}" for i in range(number)]


def listed(url: str = "http://10.0.0.5:8000", role: Role = Role.DECODE) -> WorkerAddress:
    return WorkerAddress(url, role)


def test_a_vllm_server_is_placed_and_ticketed_with_all_its_ranks():
    told = info(rank_addresses=ranks(2), control_urls=controls(2))
    view = worker_view(Worker(listed(), DEFAULT_HEALTH), told)
    assert view.protocol == "vllm"
    assert view.ref.rank_addresses == tuple(ranks(2))
    assert view.ref.address == ranks(2)[0]
    assert why_not_used(told, listed()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": "sglang"},
        {"protocol": "baton"},  # a Baton worker has no control addresses
        {"control_urls": []},
        {"control_urls": controls(2)},
        {"rank_addresses": ranks(2)},
        {"rank_addresses": list(reversed(ranks(2))), "control_urls": controls(2)},
        {"rank_addresses": ranks(MAX_RANKS + 1), "control_urls": controls(MAX_RANKS + 1)},
        {"rank_addresses": ["10.0.0.5:7000", ""], "control_urls": controls(2)},
        {"engine": ""},
        {"engine": "x" * 257},
        {"kv_events": "ipc:///run/x"},
        {"kv_events": {"topic": "t"}},
    ],
)
def test_a_description_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ProtocolError):
        info(**changes)


@pytest.mark.parametrize(
    ("control", "worker"),
    [
        ("http://10.0.0.5:7100", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:7100/", "http://10.0.0.5:8000"),
        ("http://gpu-1:7100", "http://GPU-1:8000"),
        ("http://127.0.0.1:7100", "http://localhost:8000"),
        ("http://[::1]:7100", "http://127.0.0.1:8000"),
        ("https://10.0.0.5:7100", "https://10.0.0.5:8000"),
        ("https://10.0.0.5:7100", "http://10.0.0.5:8000"),
    ],
)
def test_a_control_address_on_the_servers_own_host_is_used(control, worker):
    assert why_not_used(info(control_urls=[control]), listed(worker)) is None


@pytest.mark.parametrize(
    ("control", "worker"),
    [
        ("http://10.0.0.6:7100", "http://10.0.0.5:8000"),
        ("http://169.254.169.254:80", "http://10.0.0.5:8000"),
        ("http://127.0.0.1:7100", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:7100", "http://127.0.0.1:8000"),
        ("http://10.0.0.5:7100", "https://10.0.0.5:8000"),
        ("file:///etc/passwd", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:7100/admin", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:7100?q=1", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:7100#f", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:7100@10.0.0.6:80", "http://10.0.0.5:8000"),
        ("http://user@10.0.0.5:7100", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:99999", "http://10.0.0.5:8000"),
        ("http://[::1", "http://127.0.0.1:8000"),
        ("10.0.0.5:7100", "http://10.0.0.5:8000"),
    ],
)
def test_any_other_control_address_is_not_believed(control, worker):
    reason = why_not_used(info(control_urls=[control]), listed(worker))
    assert reason is not None
    assert control in reason


def test_each_control_address_is_looked_at():
    urls = [*controls(1), "http://10.0.0.6:7101"]
    told = info(rank_addresses=ranks(2), control_urls=urls)
    assert "10.0.0.6" in (why_not_used(told, listed()) or "")


@pytest.mark.parametrize(
    ("role", "setting"), [(Role.PREFILL, "kv_producer"), (Role.BOTH, "kv_both")]
)
def test_a_wrong_role_is_told_in_vllms_words(role, setting):
    reason = why_not_used(info(), listed(role=role))
    assert reason is not None
    assert f'"kv_role": "{setting}"' in reason
    assert "--decode" in reason


def test_a_server_of_both_roles_may_be_listed_as_any():
    for role in Role:
        assert why_not_used(info(role="both"), listed(role=role)) is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_baton_says_in_a_vllm_server_is_understood(num_ranks):
    layout = KVLayout.gqa(1, 2, 8, block_size=16, dtype="float32")
    addresses = zip(ranks(num_ranks), controls(num_ranks), strict=True)
    known = {i: RankFacts(*pair, "f", layout) for i, pair in enumerate(addresses)}
    identity = Identity(WorkerId("vllm-p"), compute_epoch("e", "i"), "prefill", num_ranks)
    model = ModelFacts("/m", "demo", 4096, ("shared", "tcp"), None)
    discovered = read_info(msgspec.json.encode(describe_worker(identity, model, known)))
    assert discovered.rank_addresses == (tuple(ranks(2)) if num_ranks == 2 else ())
    assert discovered.control_urls == tuple(controls(num_ranks))
    assert why_not_used(discovered, listed(role=Role.PREFILL)) is None

    alone = describe_worker(identity, model, {0: known[0]})  # a rank's own control server
    confirmed = read_info(msgspec.json.encode(alone))
    assert (confirmed.worker, confirmed.epoch) == (discovered.worker, discovered.epoch)
