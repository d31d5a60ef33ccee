"""The MooncakeStoreConnector of vLLM on CPUs: with an event in place of CUDA's.

It records a CUDA event after the forward pass, and waits for it before it copies blocks out. On
CPUs the pass is complete when it returns, so that there is nothing to wait for. vLLM loads this
module: `kv_connector_module_path`.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector


class HostEvent:
    """One that has happened."""

    def record(self) -> None:
        """Nothing runs that it could be after."""

    def synchronize(self) -> None:
        """Return at once."""


torch.cuda.Event = HostEvent
MooncakeStoreConnector = connector.MooncakeStoreConnector
