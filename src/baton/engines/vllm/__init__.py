"""vLLM as an engine: Baton's KV connector inside real vLLM servers.

    vllm … --kv-transfer-config '{"kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.engines.vllm", "kv_role": "kv_producer"}'

Enters: vLLM's scheduling steps and its KV tensors. Leaves: orders to a handoff agent, one for each
tensor-parallel rank, and to vLLM which requests' KV is in place. The gateway sends requests to
vLLM's own server.

File map, in the order in which a request meets them:
    connector.py            vLLM's hooks, a line or two each; compatibility.py checks vLLM
    options.py              configuration of the connector and of a server
    identity.py             worker name, epoch, cluster key, model fingerprint; its description
    admission.py            scheduler side: vLLM's objects → plain values, and results back
    adapters.py             identity of LoRA adapters
    model_variant.py        identity of what else changes KV for equal tokens
    cpu_seeds.py            requests with a seed on CPUs
    scheduler_pressure.py   how full its KV cache is
    prefix_admission.py     the same for the store; prefix_schedule.py its state machine (pure);
                            kept_blocks.py blocks that are being copied into it
    tickets.py              kv_transfer_params → a role, or a refusal; one ticket per pair of ranks
    handoff_schedule.py     the scheduler side's state machine (pure)
    step_orders.py          its orders to the workers, each step
    rank.py                 worker side: builds one rank, its agent and its control server
    rank_handoffs.py        orders in, events out; rank_prompts.py sends and loads,
                            rank_prefixes.py what is asked of the store
    in_flight.py            tables of prompts in flight
    rank_observer.py        traces and records; stats.py vLLM's log and Prometheus
    control.py              a rank's HTTP server
    layouts.py              what is in the KV memory
    kv_views.py             allocates it, and shows it to peers; host_pages.py converts pages,
                            device_pages.py copies those of a GPU beside the model,
                            registered_pages.py shows them there (`cuda_ipc`)
    serving.py              vLLM's server in `baton worker`; arguments.py its command line
    access_middleware.py    its bearer, its drain, and its fence
    event_relay.py          passes its KV events on to gateways of other hosts
    resumed_streams.py      goes on from token ids; stream_tokens.py names them in its events,
                            resumed_grammars.py has grammars accept them
    engine_process.py       set-up inside vLLM's engine process

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
