"""vLLM as an engine: Baton's KV connector inside real vLLM servers.

    vllm … --kv-transfer-config '{"kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.engines.vllm", "kv_role": "kv_producer"}'

Enters: vLLM's scheduling steps and its KV tensors. Leaves: orders to a handoff agent, one for each
tensor-parallel rank, and to vLLM which requests' KV is in place. The gateway speaks to vLLM's own
server.

File map, in the order in which a request meets them:
    connector.py            vLLM's hooks, a line or two each; compatibility.py what vLLM must have
    options.py              what an operator may set
    cluster_key.py          the key; identity.py, fingerprint.py who this is
    admission.py            scheduler side: vLLM's objects → plain values, and results back
    tickets.py              kv_transfer_params → which part of a handoff; refusals.py why none
    handoff_schedule.py     the state machine behind it
    step_orders.py          what it tells the workers each step
    held_prompts.py         how many blocks wait to be pulled
    scheduler_pressure.py   who waits for room, what is held meanwhile, how many blocks are free
    rank.py                 worker side: builds one rank, its agent and its control server
    rank_handoffs.py        orders in, events out; sends.py, loads.py what blocks wait for
    uncomputed_prefills.py  prompts that are not computed yet
    subtickets.py           one ticket → one for each pair of ranks; abort_fanout.py aborts all
    rank_observer.py        handoff_traces.py traces, handoff_records.py and stats.py vLLM's log
                            and Prometheus
    worker_info.py          what a server says of itself; control.py where it is asked
    shared_kv_memory.py     the KV memory: isa.py and layouts.py what is in it, conversion.py and
                            kv_views.py how peers see it
    serving.py              vLLM's server in `baton worker`: server_options.py → arguments.py
    checks.py               before it starts; server_probe.py whether it answers
    access_middleware.py    its bearer, and its drain
    engine_process.py       what is needed inside vLLM's engine process

Importing this package loads neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engines.vllm.connector import BatonConnector

__all__ = ["BatonConnector"]


def __getattr__(name: str) -> type[BatonConnector]:
    """Load the connector when vLLM asks for it by name.

    Raises:
        AttributeError: anything else is asked for.
        ConfigError: this vLLM lacks what the connector needs.
    """
    if name != "BatonConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from baton.engines.vllm.connector import BatonConnector  # noqa: PLC0415 - loads vLLM

    return BatonConnector
