"""The gateway's connections to workers."""

import uvicorn

from baton.gateway.connection_pool import KEEP_ALIVE_S


def test_idle_connections_are_closed_here_before_any_worker_closes_them():
    """vLLM's server keeps them as long as uvicorn does; requests that met that end were lost."""
    assert uvicorn.Config("app").timeout_keep_alive - KEEP_ALIVE_S >= 1
