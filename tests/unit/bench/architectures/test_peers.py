import os
from dataclasses import replace

import msgspec
import pytest

from baton.bench.architectures.peers.plan import Ports, plan_peer
from baton.bench.architectures.peers.proxy import PREFILL_PARAMS, prefill_body
from baton.bench.architectures.plan import choose_configurations
from baton.bench.architectures.transfer_check import prove_by_counts, read_counts
from baton.cli.bench_architectures import ServerFlags
from baton.errors import ConfigError

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} %d.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 128.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} %d.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} 8.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.6777216e+07
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 0.0
"""


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def launch(tmp_path, arm, engine="vllm"):
    flags = ServerFlags(workers=2, model=str(tmp_path), engine=engine)
    return flags.plan_launch(arm)


def arm_of(name):
    (arm,) = choose_configurations(2, [name])
    return arm


def plan(tmp_path, name, options=None):
    arm = arm_of(name)
    own = launch(tmp_path, arm, "transformers")  # vLLM need not be installed for this
    config = msgspec.structs.replace(
        own.config, worker=msgspec.structs.replace(own.config.worker, engine="vllm")
    )
    return plan_peer(arm, replace(own, config=config), options or {}, "cpu")


def test_workers_have_the_cores_threads_and_settings_of_batons_own(tmp_path, four_cores):
    peer = plan(tmp_path, "peer:nixl-1P1D", {"dtype": "float32", "max_context_tokens": 512})
    assert [(s.name, s.role, s.cores) for s in peer.servers] == [
        ("prefill-0", "prefill", (0, 1)),
        ("decode-0", "decode", (2, 3)),
    ]
    command = peer.server_command(7001)
    assert {"--dtype=float32", "--max-model-len=512", "--enforce-eager"} <= set(command)
    transfer = msgspec.json.decode(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "NixlConnector"
    inherited = {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "4"}
    variables = peer.server_environment(inherited, peer.servers[0], Ports(7001, 7002))
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7002"
    assert "VLLM_CPU_KVCACHE_SPACE" not in variables  # it would override the KV cache's size


def test_the_proxy_knows_who_prefills_and_who_decodes(tmp_path, four_cores):
    peer = plan(tmp_path, "peer:nixl-1P1D")
    urls = {"prefill-0": "http://p", "decode-0": "http://d"}
    words = peer.front_command(urls, Ports(7000, 0))
    assert words[-6:] == ("--port", "7000", "--prefill", "http://p", "--decode", "http://d")


def test_the_router_has_every_worker_in_turns_and_no_connector(tmp_path, four_cores):
    peer = plan(tmp_path, "peer:vllm-router")
    assert "--kv-transfer-config" not in peer.server_command(7001)
    words = peer.front_command({"worker-0": "http://a", "worker-1": "http://b"}, Ports(7000, 7003))
    assert words[-3:] == ("--worker-urls", "http://a", "http://b")
    assert "round_robin" in words


def test_peers_are_of_vllm_alone(tmp_path, four_cores):
    arm = arm_of("peer:nixl-1P1D")
    with pytest.raises(ConfigError, match="--engine vllm"):
        plan_peer(arm, launch(tmp_path, arm, "transformers"), {}, "cpu")
    with pytest.raises(ConfigError, match="--engine vllm"):
        ServerFlags(peers=True).find_peers()


def test_prefill_is_asked_for_one_token_and_to_keep_its_kv():
    body = {"prompt": [1, 2], "max_tokens": 64, "stream": True, "stream_options": {"a": 1}}
    assert prefill_body(body) == {
        "prompt": [1, 2], "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_PARAMS,
    }  # fmt: skip
    assert body["max_tokens"] == 64  # decode's request is as the client sent it
    assert prefill_body({"max_completion_tokens": 9})["max_completion_tokens"] == 1


def test_what_decode_servers_counted_is_the_proof():
    spent = read_counts(METRICS % (16, 2048)) - read_counts(METRICS % (8, 0))
    assert (spent.num_received_tokens, spent.num_cached_tokens) == (2048, 0)
    proof = prove_by_counts(msgspec.structs.replace(spent, num_bytes=4096), 8)
    assert proof.is_proved  # each of eight computed its last token itself
    assert (proof.num_needed_tokens, proof.num_received_tokens) == (2056, 2048)
    assert (proof.num_bytes, proof.source) == (4096, "metrics")


def test_prompts_that_decode_computed_are_no_proof():
    spent = read_counts(METRICS % (600, 1400))
    proof = prove_by_counts(spent, 8)
    assert not proof.is_proved
    assert proof.num_not_handed_over == 3  # 592 tokens, of prompts of 250
    none_moved = msgspec.structs.replace(spent, num_bytes=0.0)
    assert prove_by_counts(none_moved, 8).num_not_handed_over == 8


def test_a_peer_that_does_not_tell_is_said_not_to():
    assert read_counts("vllm:num_requests_running 0.0\n") is None
    proof = prove_by_counts(None, 3)
    assert proof.problem == "not shown by the peer"
    assert not proof.is_proved
