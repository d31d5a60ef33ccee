"""What the connector needs of the vLLM around it, checked before anything else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from baton.engines.vllm.identity import read_vllm_version
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

NEEDED_HOOKS: Final = (
    "bind_connector_metadata",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_handshake_metadata",
    "get_mem_pool_context",
    "handle_preemptions",
    "set_xfer_handshake_metadata",
    "update_connector_output",
)
"""Methods of vLLM's connector interface without which KV would be lost, or overwritten in use."""


def check_hooks(interface: type) -> None:
    """Refuse a vLLM whose connector interface lacks what this one relies on.

    Raises:
        ConfigError: lists what is missing, and the version that has it.
    """
    missing = [name for name in NEEDED_HOOKS if not hasattr(interface, name)]
    if missing:
        raise ConfigError(
            f"vLLM {read_vllm_version()} does not call connectors at "
            f"{', '.join(missing)}, which Baton needs; use vLLM 0.32 or newer"
        )


def check_data_parallel(num_engines: int, *, is_external: bool) -> None:
    """Refuse several engines behind one address; `is_external`: each has an address of its own.

    Raises:
        ConfigError: there are.
    """
    if num_engines > 1 and not is_external:
        raise ConfigError(
            "--data-parallel-size above 1 puts several engines behind one address, and KV is "
            "handed over to one of them: start a server for each engine, and list all of them"
        )


def join_logging() -> None:
    """Let Baton's log appear where vLLM's does, unless it is configured already."""
    ours, theirs = logging.getLogger("baton"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level or logging.INFO)
    ours.propagate = False


def read_preempted(scheduler_output: object) -> frozenset[str]:
    """Requests that lost their blocks just before this step.

    Raises:
        ConfigError: this vLLM does not report them.
    """
    preempted: object = getattr(scheduler_output, "preempted_req_ids", None)
    if preempted is None:
        return frozenset()
    if not isinstance(preempted, set | frozenset):
        raise ConfigError(f"vLLM {read_vllm_version()} names preempted requests in another way")
    return frozenset(map(str, preempted))


def warn_of_policy(kv_transfer_config: object) -> None:
    """Log what vLLM's default does with a request whose KV does not arrive."""
    if getattr(kv_transfer_config, "kv_load_failure_policy", None) == "fail":
        logger.warning(
            'kv_load_failure_policy is "fail", vLLM\'s default: a request whose KV does not arrive '
            'is answered with an error. With "recompute" it is computed here instead'
        )


def warn_of_unused_store() -> None:
    """Log that prompts are neither loaded from the configured store nor kept in it."""
    logger.warning(
        "the store serves mode pool alone: to load and keep prompts, vLLM needs "
        '"kv_load_failure_policy": "recompute"'
    )


def warn_of_graphs(compilation_config: object) -> None:
    """Log that a prefill worker's layers are sent late, if CUDA graphs hold passes of prompts.

    Modes in which only decode batches are full graphs (`FULL_AND_PIECEWISE`, vLLM's default, and
    `FULL_DECODE_ONLY`) cost at most prompts of which one token is left to compute.
    """
    mode = getattr(compilation_config, "cudagraph_mode", None)
    if mode is not None and mode and mode.mixed_mode() == type(mode).FULL:
        logger.warning(
            "cudagraph_mode %s: prompts of up to max_cudagraph_capture_size tokens are computed in "
            "full CUDA graphs, so that their layers are all sent after the last one. With "
            '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\' they are sent as '
            "they are computed",
            mode.name,
        )


def may_load_prefixes(kv_transfer_config: object) -> bool:
    """Whether vLLM computes what a load does not find any more."""
    return getattr(kv_transfer_config, "kv_load_failure_policy", None) == "recompute"


def read_extra(kv_transfer_config: object) -> Mapping[str, object]:
    """`kv_connector_extra_config`."""
    extra: object = getattr(kv_transfer_config, "kv_connector_extra_config", None)
    return extra if isinstance(extra, dict) else {}
