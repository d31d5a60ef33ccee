from __future__ import annotations

import pytest
from yarl import URL

from baton.errors import ConfigError
from baton.gateway.kv_events import MAX_PATH_BYTES, EventEndpoints, locate_events
from baton.protocol.worker_http import KVEventsSource

NEAR = "http://127.0.0.1:8000"
FAR = "http://10.0.0.5:8000"
NAMED = "http://GPU-1:8000"


def located(endpoint: str, replay: str | None, listed: str) -> EventEndpoints:
    return locate_events(KVEventsSource(endpoint, replay, "t"), URL(listed).origin())


@pytest.mark.parametrize(
    ("endpoint", "listed", "reached", "bind"),
    [
        ("ipc:///run/kv", NEAR, "ipc:///run/kv", False),
        ("ipc:///run/kv", "http://localhost:1", "ipc:///run/kv", False),
        ("ipc:///run/kv", "http://[::1]:1", "ipc:///run/kv", False),
        (
            "ipc:///" + "x" * (MAX_PATH_BYTES - 1),
            NEAR,
            "ipc:///" + "x" * (MAX_PATH_BYTES - 1),
            False,
        ),
        ("tcp://*:5557", FAR, "tcp://10.0.0.5:5557", False),
        ("tcp://*:5557", NAMED, "tcp://gpu-1:5557", False),
        ("tcp://*:5557", NEAR, "tcp://127.0.0.1:5557", False),
        ("tcp://*:5557", "http://localhost:1", "tcp://127.0.0.1:5557", False),
        ("tcp://*:5557", "http://[::1]:1", "tcp://127.0.0.1:5557", False),
        ("tcp://127.0.0.1:5557", NEAR, "tcp://127.0.0.1:5557", True),
        ("tcp://localhost:65535", NEAR, "tcp://127.0.0.1:65535", True),
        ("tcp://LOCALHOST:1", "http://[::1]:1", "tcp://127.0.0.1:1", True),
    ],
)
def test_where_live_events_are_had(endpoint, listed, reached, bind):
    found = located(endpoint, None, listed)
    assert found.live.endpoint == reached
    assert found.live.bind is bind
    assert found.live.topic == "t"
    assert found.replay is None


@pytest.mark.parametrize(
    ("endpoint", "listed"),
    [
        ("ipc:///run/kv", FAR),
        ("ipc:///run/kv", NAMED),
        ("ipc://", NEAR),
        ("ipc:///" + "x" * MAX_PATH_BYTES, NEAR),
        ("ipc:///run/k\0v", NEAR),
        ("ipc:///run/*", NEAR),
        ("inproc://kv", NEAR),
        ("udp://127.0.0.1:5557", NEAR),
        ("127.0.0.1:5557", NEAR),
        ("tcp://10.0.0.5:5557", FAR),  # vLLM would connect there: nobody listens
        ("tcp://gpu-1:5557", NAMED),
        ("tcp://127.0.0.1:5557", FAR),
        ("tcp://10.0.0.6:5557", NEAR),
        ("tcp://169.254.169.254:80", NEAR),
        ("tcp://0.0.0.0:5557", NEAR),
        ("tcp://*:0", NEAR),
        ("tcp://*:65536", NEAR),
        ("tcp://*:*", NEAR),
        ("tcp://*", NEAR),
        ("tcp://*:5557;10.0.0.6:1", FAR),
        ("tcp://10.0.0.6:1;*:5557", FAR),
        ("tcp://*:5557\n", FAR),
        ("tcp://*:\uff15\uff15", FAR),
        ("tcp://[::]:5557", NEAR),
        ("tcp://[::1]:5557", NEAR),
        ("tcp://*:5557", "http://[2001:db8::1]:8000"),
    ],
)
def test_where_live_events_are_not_had(endpoint, listed):
    with pytest.raises(ConfigError):
        located(endpoint, None, listed)


@pytest.mark.parametrize(
    ("replay", "listed", "reached"),
    [
        ("ipc:///run/replay", NEAR, "ipc:///run/replay"),
        ("tcp://*:5558", FAR, "tcp://10.0.0.5:5558"),
        ("tcp://0.0.0.0:5558", NAMED, "tcp://gpu-1:5558"),
        ("tcp://10.0.0.5:5558", FAR, "tcp://10.0.0.5:5558"),
        ("tcp://gpu-1:5558", NAMED, "tcp://gpu-1:5558"),
        ("tcp://127.0.0.1:5558", NEAR, "tcp://127.0.0.1:5558"),
        ("tcp://localhost:5558", NEAR, "tcp://127.0.0.1:5558"),
    ],
)
def test_where_what_was_missed_is_asked_for(replay, listed, reached):
    found = located("tcp://*:5557", replay, listed)
    assert found.replay is not None
    assert found.replay.endpoint == reached


@pytest.mark.parametrize(
    ("replay", "listed"),
    [
        ("ipc:///run/replay", FAR),
        ("tcp://10.0.0.6:5558", FAR),
        ("tcp://127.0.0.1:5558", FAR),
        ("tcp://169.254.169.254:80", NEAR),
        ("tcp://eth0:5558", FAR),
        ("tcp://*:0", FAR),
        ("", FAR),
    ],
)
def test_where_what_was_missed_is_not_asked_for(replay, listed):
    with pytest.raises(ConfigError) as refused:
        located("tcp://*:5557", replay, listed)
    assert repr(replay) in str(refused.value)


def test_a_reason_says_what_to_change():
    with pytest.raises(ConfigError, match=r'"endpoint": "tcp://\*:5557"'):
        located("tcp://10.0.0.5:5557", None, FAR)
    with pytest.raises(ConfigError, match=r'"replay_endpoint": "tcp://\*:5558"'):
        located("tcp://*:5557", "tcp://10.0.0.6:5558", FAR)
    with pytest.raises(ConfigError, match="loopback"):
        located("ipc:///run/kv", None, FAR)
