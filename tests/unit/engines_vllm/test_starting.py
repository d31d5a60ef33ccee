"""What is found before vLLM starts, and what it says of itself when it has."""

import asyncio
import ctypes
import importlib.metadata
import signal
from types import SimpleNamespace

import pytest

from baton.clock import MachineClock
from baton.config.sections import Config, PreemptionSection, SecuritySection
from baton.engines.vllm.access_middleware import DrainState
from baton.engines.vllm.arguments import check_model, check_room, find_platform
from baton.engines.vllm.options import VllmOptions
from baton.engines.vllm.serving import (
    ProbedIdentity,
    ServerLifecycle,
    _parse,
    read_identity,
)
from baton.errors import ConfigError, EngineError
from baton.net.preemption import PreemptionWatch
from baton.telemetry.process_status import StatusReporter

MIB = 1024 * 1024

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports


def test_an_identity_is_read_from_a_probes_answer():
    body = (
        b'{"id":"cmpl-1","choices":[],"kv_transfer_params":{"baton_info":{"worker":"w",'
        b'"epoch":"e","handoff_address":"h:1","role":"both","layout":{}}}}'
    )
    assert read_identity(body) == ProbedIdentity("w", "e", "h:1")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b'{"error":{"message":"no such model"}}',
        b'{"choices":[],"kv_transfer_params":null}',
        b'{"kv_transfer_params":{}}',
        b'{"kv_transfer_params":{"baton_info":{"worker":"w"}}}',
    ],
)
def test_a_server_without_the_connector_is_recognised(body):
    with pytest.raises(EngineError, match="not with what Baton's connector answers"):
        read_identity(body)


@pytest.mark.parametrize("is_launched", [False, True])
def test_sigterm_again_ends_a_server_at_once_unless_a_launcher_passes_it_on(
    monkeypatch, is_launched
):
    """A launcher's child ends with its parent: prctl(2), PR_SET_PDEATHSIG."""
    reporter, config = StatusReporter(-1), Config(security=SecuritySection(tls="off"))
    watch = PreemptionWatch(PreemptionSection(), "w", MachineClock(), reporter)
    context = SimpleNamespace(config=config, status_reporter=reporter, membership=None)
    life = ServerLifecycle(context, watch, None)
    left, stops = [], []

    def leave(status):
        left.append(status)
        raise SystemExit

    monkeypatch.setattr(life, "_exit", leave)

    async def scenario():
        life._on_signal(signal.SIGTERM, lambda: stops.append(True))
        try:
            life._on_signal(signal.SIGTERM, lambda: None)
        except SystemExit:
            return
        await life._ending

    monkeypatch.setattr("baton.engines.vllm.serving.DRAIN_STATE", DrainState())
    prctl = ctypes.CDLL(None).prctl
    prctl(1, signal.SIGKILL if is_launched else 0)
    try:
        asyncio.run(scenario())
    finally:
        prctl(1, 0)
    assert left == ([] if is_launched else [128 + signal.SIGTERM])
    assert stops, "vLLM's own handler has ended it"


def test_a_folder_must_hold_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        check_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text("{}", "utf-8")
    check_model(tmp_path)


@pytest.mark.parametrize(("free_mib", "fits"), [(102, True), (101, False)])
def test_weights_and_kv_must_fit_the_free_memory(tmp_path, free_mib, fits):
    (tmp_path / "a.safetensors").write_bytes(bytes(2 * MIB))
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: 9 kB\nMemAvailable:  {free_mib * 1024} kB\n", "ascii")
    options = VllmOptions(kv_cache_bytes=100 * MIB)
    if fits:
        check_room(options, tmp_path, memory)
        return
    with pytest.raises(ConfigError, match=r"100 MiB for KV .* 2 MiB of weights, 101 MiB are free"):
        check_room(options, tmp_path, memory)


def test_without_knowledge_of_the_memory_nothing_is_refused(tmp_path):
    check_room(VllmOptions(), tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("version", "platform"), [("0.32.0", "accelerator"), ("0.32.0+cpu", "cpu"), (None, "cpu")]
)
def test_the_distribution_says_what_vllm_was_built_for(monkeypatch, version, platform):
    def find(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    assert find_platform() == platform


@pytest.mark.parametrize("flags", [["--data-parallel-size=2"], ["-dp", "2"]])
def test_several_engines_behind_one_address_are_refused_before_any_starts(flags):
    with pytest.raises(ConfigError, match="start a server for each engine"):
        _parse(["--model", "m", *flags])
    assert _parse(["--model", "m", *flags, "--data-parallel-rank=1"]).data_parallel_size == 2
