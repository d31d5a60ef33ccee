from __future__ import annotations

import pytest

from baton.errors import ConfigError
from baton.events.endpoint import LiveEndpoint, ReplayEndpoint


@pytest.mark.parametrize("endpoint", ["ipc:///run/kv", "tcp://127.0.0.1:5557", "tcp://host:1"])
def test_endpoints_to_connect_to(endpoint):
    LiveEndpoint(endpoint)
    ReplayEndpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["", "inproc://x", "127.0.0.1:5557", "tcp://*:5557"])
def test_endpoints_that_cannot_be_connected_to(endpoint):
    for kind in (LiveEndpoint, ReplayEndpoint):
        with pytest.raises(ConfigError):
            kind(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557"])
def test_loopback_may_be_bound(endpoint):
    assert LiveEndpoint(endpoint, bind=True).bind


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "ipc:///run/kv"])
def test_nothing_else_may_be_bound(endpoint):
    with pytest.raises(ConfigError):
        LiveEndpoint(endpoint, bind=True)
