"""Baton's settings as vLLM's command line and environment."""

import json
from pathlib import Path

import msgspec
import pytest

from baton.config.resolve import CommandLine, resolve
from baton.engines.vllm.arguments import (
    LaunchParameters,
    event_endpoints,
    server_arguments,
    server_environment,
)
from baton.engines.vllm.options import VllmOptions, read_options, require_cpu_block_size
from baton.errors import ConfigError
from baton.events.subscriber import MAX_QUEUED_REPLAYS

RUN = Path("/run/user/7/baton/worker-81")


def arguments(*assignments, platform="cpu", **options):
    config = resolve(CommandLine(assignments=assignments), {}).to_config()
    launch = LaunchParameters(Path("/m"), "name", 81, RUN, platform)
    return server_arguments(msgspec.convert(options, VllmOptions), config, launch)


def value_of(words, flag):
    """A flag's value, in either way of writing it; None if it is not given."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def test_model_and_address():
    words = arguments("worker.host=::1")
    assert value_of(words, "--model") == "/m"
    assert value_of(words, "--served-model-name") == "name"
    assert value_of(words, "--host") == "::1"
    assert value_of(words, "--port") == "81"
    assert (
        value_of(words, "--middleware") == "baton.engines.vllm.access_middleware.AccessMiddleware"
    )


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")],
)
def test_the_connector(role, kv_role):
    words = arguments(
        f"worker.role={role}",
        "worker.name=w",
        "worker.handoff_port=9",
        "handoff.timeout_s=5",
        "transfer.transports=tcp",
        "transfer.options.tcp.num_streams=2",
    )
    transfer = json.loads(value_of(words, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "BatonConnector"
    assert transfer["kv_connector_module_path"] == "baton.engines.vllm"
    assert transfer["kv_role"] == kv_role
    assert transfer["kv_load_failure_policy"] == "recompute"
    options = read_options(transfer["kv_connector_extra_config"])  # the connector takes them all
    assert (options.name, options.handoff_port, options.handoff_timeout_s) == ("w", 9, 5.0)
    assert options.transports == ("tcp",)
    assert options.transport_options == {"tcp": {"num_streams": 2}}
    assert options.key_file is None


@pytest.mark.parametrize(
    ("tls", "clients_are_gateways"), [("off", False), ("control", True), ("all", True)]
)
def test_tickets_are_believed_where_tls_lets_gateways_alone_ask(tls, clients_are_gateways):
    words = arguments(f"security.tls={tls}")
    transfer = json.loads(value_of(words, "--kv-transfer-config"))
    options = read_options(transfer["kv_connector_extra_config"])
    assert options.clients_are_gateways is clients_are_gateways


def test_the_ports_that_a_firewall_lets_through_reach_the_connector():
    words = arguments("transfer.options.tcp.port=7300", control_port=7200)
    transfer = json.loads(value_of(words, "--kv-transfer-config"))
    options = read_options(transfer["kv_connector_extra_config"])
    assert options.control_port == 7200
    assert options.transport_options == {"tcp": {"port": 7300}}


def test_encodings_of_entries_and_of_handoffs():
    words = arguments("store.encoding=int8", "handoff.encoding=fp8", "handoff.staging_bytes=99")
    transfer = json.loads(value_of(words, "--kv-transfer-config"))
    options = read_options(transfer["kv_connector_extra_config"])
    assert options.store.encoding == "int8"
    assert (options.handoff_encoding, options.staging_bytes) == ("fp8", 99)
    words = arguments("store.error_budget=0", "handoff.error_budget=0.01")
    budgets = json.loads(value_of(words, "--kv-transfer-config"))
    options = read_options(budgets["kv_connector_extra_config"])
    assert (options.store.error_budget, options.handoff_error_budget) == (0.0, 0.01)
    plain = json.loads(value_of(arguments(), "--kv-transfer-config"))
    options = read_options(plain["kv_connector_extra_config"])
    assert (options.handoff_encoding, options.staging_bytes) == ("raw", None)
    assert options.handoff_error_budget is options.store.error_budget is None


def test_staging_memory_is_by_the_device_unless_it_is_set():
    for settings, expected in (((), None), (("handoff.staging_bytes=8589934592",), 8 << 30)):
        transfer = json.loads(value_of(arguments(*settings), "--kv-transfer-config"))
        assert read_options(transfer["kv_connector_extra_config"]).staging_bytes == expected


def test_a_key_file_is_handed_on_by_name():
    transfer = json.loads(value_of(arguments("cluster.key_file=/k"), "--kv-transfer-config"))
    assert read_options(transfer["kv_connector_extra_config"]).key_file == "/k"


@pytest.mark.parametrize(
    ("options", "flag", "cpu", "accelerator"),
    [
        ({}, "--kv-cache-memory-bytes", "536870912", None),
        ({"kv_cache_bytes": 7}, "--kv-cache-memory-bytes", "7", "7"),
        ({}, "--max-model-len", "-1", None),
        ({"max_context_tokens": 9}, "--max-model-len", "9", "9"),
        ({"block_size": 64}, "--block-size", "64", "64"),
        ({}, "--block-size", None, None),
        ({"dtype": "float32"}, "--dtype", "float32", "float32"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype", "fp8", "fp8"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size", "2", "2"),
        ({"max_num_batched_tokens": 256}, "--max-num-batched-tokens", "256", "256"),
        (
            {"speculative": {"method": "ngram"}},
            "--speculative-config",
            '{"method":"ngram"}',
            '{"method":"ngram"}',
        ),
    ],
)
def test_options_become_flags(options, flag, cpu, accelerator):
    assert value_of(arguments(**options), flag) == cpu
    assert value_of(arguments(platform="accelerator", **options), flag) == accelerator


def test_switches():
    assert "--enforce-eager" in arguments()
    assert "--enforce-eager" not in arguments(enforce_eager=False)
    assert "--enforce-eager" not in arguments(platform="accelerator")
    assert "--enforce-eager" in arguments(platform="accelerator", enforce_eager=True)
    assert "--enable-prefix-caching" in arguments()
    assert "--no-enable-prefix-caching" in arguments(prefix_caching=False)


def test_further_flags_come_last_and_win():
    assert arguments(arguments=["--block-size", "32", "--seed=1"])[-3:] == [
        "--block-size",
        "32",
        "--seed=1",
    ]


def test_events_are_published_where_only_this_user_may_look():
    events = json.loads(value_of(arguments("worker.name=w"), "--kv-events-config"))
    assert events["enable_kv_cache_events"] is True
    assert (events["endpoint"], events["replay_endpoint"]) == event_endpoints(RUN)
    assert events["endpoint"] == f"ipc://{RUN}/events"
    assert events["topic"] == "kv@w"
    assert 10_000 < events["buffer_steps"] < MAX_QUEUED_REPLAYS, "more than by itself, and no loss"
    assert value_of(arguments(kv_events=False), "--kv-events-config") is None


@pytest.mark.parametrize(
    ("host", "options", "is_relayed"),
    [
        ("0.0.0.0", {}, True),
        ("10.0.0.5", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"kv_events": False}, False),
        ("0.0.0.0", {"arguments": ["--data-parallel-rank=1"]}, False),
    ],
)
def test_events_are_passed_on_where_gateways_of_other_hosts_may_ask(host, options, is_relayed):
    words = arguments(f"worker.host={host}", "worker.name=w", **options)
    extra = json.loads(value_of(words, "--kv-transfer-config"))["kv_connector_extra_config"]
    endpoint = event_endpoints(RUN)[0] if is_relayed else None
    assert extra.get("relayed_kv_events") == endpoint
    assert read_options(extra).relayed_kv_events == endpoint


@pytest.mark.parametrize(
    ("words", "publishes"),
    [
        (("--data-parallel-rank=1",), False),
        (("--data_parallel_rank", "1"), False),
        (("-dpn", "2"), False),
        (("--data-parallel-rank", "0"), True),
        (("--data-parallel-size", "1"), True),
    ],
)
def test_a_further_data_parallel_rank_publishes_no_events_at_a_path(words, publishes, caplog):
    """vLLM adds its rank to a port; given a path, it does not start."""
    events = value_of(arguments(arguments=words), "--kv-events-config")
    assert (events is not None) is publishes
    assert len(caplog.records) == (not publishes)


@pytest.mark.parametrize(
    "words", [("--kv-events-config", "{}"), ("--kv_events_config={}",), ("--kv-events-config={}",)]
)
def test_a_further_rank_with_endpoints_of_its_own_is_not_warned_of(words, caplog):
    given = arguments(arguments=("--data-parallel-rank=1", *words))
    assert given[-len(words) :] == list(words)
    assert sum("kv-events" in word.replace("_", "-") for word in given) == 1
    assert not caplog.records


def environment(platform="cpu", cores=(0, 1, 2, 3), level="info", **options):
    return server_environment(msgspec.convert(options, VllmOptions), level, cores, platform)


def test_nothing_is_reported_or_downloaded_and_logs_go_to_standard_error():
    for platform in ("cpu", "accelerator"):
        values = environment(platform)
        assert values["VLLM_NO_USAGE_STATS"] == values["DO_NOT_TRACK"] == "1"
        assert values["HF_HUB_OFFLINE"] == "1"
        assert values["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    assert environment()["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert environment(level="debug")["VLLM_LOGGING_LEVEL"] == "INFO"


def test_gpu_machines_keep_vllms_own_defaults():
    assert not {"OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"} & set(
        environment("accelerator")
    )
    assert environment("accelerator", num_threads=3)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("options", "cores", "processes", "threads", "binding"),
    [
        ({}, (0, 1, 2, 3), "0", "4", "nobind"),
        ({"num_threads": 1}, (0, 1, 2, 3), "0", "1", "nobind"),
        ({"multiprocessing": True}, (0, 1), "1", "2", "nobind"),
        ({"tensor_parallel_size": 2}, (1, 3, 5, 7), "1", "2", "1,3|5,7"),
        ({"tensor_parallel_size": 2, "num_threads": 1}, (4, 6), "1", "1", "4|6"),
        ({"tensor_parallel_size": 2}, (5,), "1", "1", "nobind"),
    ],
)
def test_threads_and_processes_on_cpus(options, cores, processes, threads, binding):
    values = environment(cores=cores, **options)
    assert values["VLLM_ENABLE_V1_MULTIPROCESSING"] == processes
    assert values["OMP_NUM_THREADS"] == threads
    assert values["VLLM_CPU_OMP_THREADS_BIND"] == binding


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"blok_size": 8}, "blok_size"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes"),
        ({"kv_cache_dtype": ""}, "kv_cache_dtype"),
        ({"tensor_parallel_size": 2, "multiprocessing": False}, "needs multiprocessing"),
        ({"arguments": ["--port=3"]}, "worker.port decides that"),
        ({"arguments": ["--kv_transfer_config.kv_role=kv_both"]}, "connector decides that"),
        ({"arguments": ["--seed", "1", "--kv-transfer-config", "{}"]}, "Baton's connector"),
        ({"arguments": "--seed"}, "arguments"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(options, VllmOptions)


@pytest.mark.parametrize("block_size", [None, 32, 128])
def test_block_sizes_that_cpus_take(block_size):
    require_cpu_block_size(VllmOptions(block_size=block_size))


def test_block_sizes_that_cpus_do_not_take():
    with pytest.raises(ConfigError, match="multiples of 32"):
        require_cpu_block_size(VllmOptions(block_size=16))
