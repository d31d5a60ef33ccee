"""vLLM servers of single fixtures: each may load while the tests before are still running."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tests.chaos import store_failpoints
from tests.chaos.vllm_pair import start_slow_prefill
from tests.e2e_vllm.adapters import make_adapter
from tests.e2e_vllm.cluster import ENGINE, KV_BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from baton.config.sections import Role
    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.cluster import ClusterFactory, Starter

SMALL_CONTEXT: Final = 1024
SMALL_POOL: Final = 1536


def start_speculating(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """Decode servers that guess ahead, by n-grams and by a draft model."""
    ngram = "num_speculative_tokens = 3, prompt_lookup_max = 4, prompt_lookup_min = 2"
    draft = f'num_speculative_tokens = 3, model = "{cluster_factory.model}"'
    return (
        cluster_factory.start(
            "ngram",
            "decode",
            engine__speculative=f'{{method = "ngram", {ngram}}}',
            engine__block_size=128,
            transfer__transports=["tcp"],
        ),
        cluster_factory.start(
            "draft", "decode", engine__speculative=f'{{method = "draft_model", {draft}}}'
        ),
    )


def start_fp8_pair(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """Started as a user of vLLM starts it; native pages over sockets."""

    def transfer(name: str, role: str) -> dict[str, object]:
        return {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.engines.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"name": name, "transports": ["tcp"]},
        }

    fp8 = "--kv-cache-dtype=fp8"
    return (
        cluster_factory.start_plain("fp8-p", fp8, transfer=transfer("fp8-p", "kv_producer")),
        cluster_factory.start_plain("fp8-d", fp8, transfer=transfer("fp8-d", "kv_consumer")),
    )


def start_other_rope(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """The same files, read with other positions."""
    rope = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}})
    arguments = [*ENGINE["engine.arguments"], "--hf-overrides", rope]
    return (cluster_factory.start("other-rope", "decode", engine__arguments=arguments),)


def start_transformers(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    return (cluster_factory.start_transformers("transformers", "both", block_size=24),)


def start_two_ranks(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """Four processes on two cores: it takes twice as long as others to start."""
    server = cluster_factory.start(
        "two-ranks",
        "both",
        engine__tensor_parallel_size=2,
        engine__prefix_caching=False,  # so that what it computed comes from the store
        store__prefixes=True,
    )
    return (server,)


def file_store(cluster_factory: ClusterFactory, name: str = "kv") -> dict[str, object]:
    """Settings of workers that share a folder."""
    folder = str(cluster_factory.run_directory / name)
    return {"store.tiers": ["file"], "store.options.file.directory": folder}


def start_stored(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """Two servers that share a folder; the second can be held in the middle of a read."""
    first = file_store(cluster_factory)
    point = cluster_factory.run_directory / "point"
    point.mkdir()
    place = first["store.options.file.directory"]
    second = store_failpoints.settings(point, "file", {"directory": place})
    return (
        cluster_factory.start("stored-1", "both", store__prefixes=True, **first),
        cluster_factory.start(
            "stored-2", "both", store__prefixes=True, engine__block_size=128, **second
        ),
    )


def start_adapted(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """A prefill and a decode server with LoRA adapters, and a store.

    `sql` and `law` are the same on both, `mixed` has other weights on each, decode alone has `solo`
    (the weights of `sql`).
    """
    folder = cluster_factory.run_directory / "adapters"
    folder.mkdir()
    sql, law = make_adapter(folder / "sql", 1), make_adapter(folder / "law", 2)
    same = {"sql": sql, "law": law}
    return (
        _start_with_adapters(cluster_factory, "lora-p", "prefill", {**same, "mixed": sql}),
        _start_with_adapters(
            cluster_factory, "lora-d", "decode", {**same, "mixed": law, "solo": sql}
        ),
    )


def _start_with_adapters(
    cluster_factory: ClusterFactory, name: str, role: Role, modules: Mapping[str, Path]
) -> FleetProcess:
    return cluster_factory.start(
        name,
        role,
        engine__arguments=[
            *ENGINE["engine.arguments"],
            *("--enable-lora", "--max-loras=4", "--lora-modules"),
            *(f"{adapter}={path}" for adapter, path in modules.items()),
        ],
        store__prefixes=True,
        **file_store(cluster_factory, "adapters-kv"),
    )


def start_small_decode(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """Has few blocks, and does not compute what it could not load."""
    server = cluster_factory.start_plain(
        "small-decode",
        f"--max-model-len={SMALL_CONTEXT}",
        f"--kv-cache-memory-bytes={SMALL_POOL * KV_BYTES_PER_TOKEN}",
        transfer={
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.engines.vllm",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"name": "small-decode", "handoff_timeout_s": 20},
        },
    )
    return (server,)


def start_trained(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """Has a store, and vLLM's endpoints by which its weights can be replaced."""
    server = cluster_factory.start_plain(
        "trained",
        transfer={
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "name": "trained",
                "store": {
                    "tiers": ["file"],
                    "options": {"file": {"directory": str(find_trained_kv(cluster_factory))}},
                },
            },
        },
        variables={"VLLM_SERVER_DEV_MODE": "1"},
    )
    return (server,)


def find_trained_kv(cluster_factory: ClusterFactory) -> Path:
    """The store of the server `trained`."""
    return cluster_factory.run_directory / "trained-kv"


def start_victims(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """Two more decode servers that do not live long; `find_notice` is for one of them."""
    notice = str(find_notice(cluster_factory))
    drained = cluster_factory.start(
        "drained",
        "decode",
        preemption__source="file",
        preemption__file=notice,
        preemption__interval_s=0.1,
    )
    return drained, cluster_factory.start("killed", "decode")


def find_notice(cluster_factory: ClusterFactory) -> Path:
    """The file from which the server `drained` knows that its machine will be taken."""
    return cluster_factory.run_directory / "notice"


STARTERS: Final[Mapping[str, Starter]] = {
    "speculating": start_speculating,
    "fp8_pair": start_fp8_pair,
    "other_rope": start_other_rope,
    "transformers": start_transformers,
    "two_ranks": start_two_ranks,
    "stored": start_stored,
    "adapted": start_adapted,
    "standing_pair": start_slow_prefill,
    "small_decode": start_small_decode,
    "victims": start_victims,
    "trained": start_trained,
}
"""By the name of the fixture."""
