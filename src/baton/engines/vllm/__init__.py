"""vLLM as an engine: Baton's KV connector inside real vLLM servers.

    vllm … --kv-transfer-config '{"kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.engines.vllm", "kv_role": "kv_producer"}'

Enters: vLLM's scheduling steps and its KV tensors. Leaves: orders to a handoff agent, one for each
tensor-parallel rank, and to vLLM which requests' KV is in place. The gateway speaks to vLLM's own
server.

File map, in the order in which a request meets them:
    connector.py    vLLM's hooks, a line or two each; compatibility.py what vLLM must have
    options.py      what an operator may set; key.py, identity.py, fingerprint.py who this is
    admission.py    scheduler side: vLLM's objects → plain values, and verdicts back
    tickets.py      kv_transfer_params → which part of a handoff; refusals.py why none
    scheduling.py   the state machine behind it; meta.py what it tells the workers each step
    congestion.py   who waits for room, what is held meanwhile, how many blocks are free
    rank.py         worker side: builds one rank, its agent and its control server
    working.py      orders in, events out; sends.py, loads.py what blocks wait for
    backlog.py      prompts that are not computed yet, for which the agent vouches
    subtickets.py   one ticket → one for each pair of ranks; fates.py what befalls all of them
    observing.py    legs.py traces, records.py and stats.py vLLM's log and Prometheus
    information.py  what a server says of itself; control.py where it is asked
    pool.py         the KV memory: isa.py and layouts.py what is in it, conversion.py and faces.py
                    how peers see it
    serving.py      vLLM's server in `baton worker`: server_options.py → arguments.py, checks.py
                    before it starts, probing.py whether it answers, gate.py its drain and bearer,
                    engine_process.py what is needed inside vLLM's engine process

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
