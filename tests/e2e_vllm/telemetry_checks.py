"""What telemetry shows of requests that real vLLM servers have served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from baton.cli.main import run as run_command
from tests.e2e_vllm.client import get_text, read_request, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.client import Answer

FEED_WITHIN_S = 12.0
"""The gateway reads what workers have measured every 5 s."""
MISMATCH_WITHIN_S = 30.0
STAGES = {
    "gateway": {"admit", "answer"},
    "prefill": {"queue", "prefill"},
    "transfer": {"transfer"},
    "decode": {"reserve", "accept", "queue", "first step", "decode"},
}
"""At least, of a request whose KV was handed over."""


def check_stages(gateway: FleetProcess, answer: Answer, num_layers: int) -> None:
    """A trace has all lanes on one axis, and each layer's way."""
    request = read_request(gateway, answer.request_id)
    lanes = {lane["name"]: lane for lane in request["timeline"]}
    assert lanes.keys() == STAGES.keys()
    for name, stages in STAGES.items():
        assert stages <= {stage["name"] for stage in lanes[name]["stages"]}, name
        assert lanes[name]["clock"] is not None, name
    assert request["missing"] == []
    layers = request["layers"]
    assert [each["layer"] for each in layers] == list(range(num_layers))
    until_s = lanes["gateway"]["end_s"]
    assert all(0 < each["ready_s"] <= each["landed_s"] < until_s for each in layers)
    # vLLM computes one layer after the other.
    ready_s = [each["ready_s"] for each in layers]
    assert ready_s == sorted(ready_s)
    assert len(set(ready_s)) > 1


def check_commands(
    gateway: FleetProcess,
    answer: Answer,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`baton explain` and `baton trace export` draw it."""
    capsys.readouterr()
    command = ["explain", str(answer.request_id), "--gateway", gateway.url, "--layers"]
    assert run_command(command) == 0
    drawn = capsys.readouterr().out
    for text in ("layers from computed to landed", "layer 0", "prefill → decode", "first step"):
        assert text in drawn
    path = folder / "traces.json"
    assert run_command(["trace", "export", "-o", str(path), "--gateway", gateway.url]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {"prefill", "decode", "layer 0"} <= {each["name"] for each in events}


def read_transfers(
    gateway: FleetProcess, is_there: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """`/debug/transfers`, once it has what is waited for."""
    pages: list[dict[str, Any]] = []

    def look() -> bool:
        pages[:] = [json.loads(get_text(f"{gateway.url}/debug/transfers"))]
        return is_there(pages[0])

    wait_until(look, FEED_WITHIN_S, lambda: pages)
    return pages[0]


def find_pair(listed: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    """The one entry with these fields."""
    (found,) = [each for each in listed if fields.items() <= each.items()]
    return found


def wait_for_mismatch(gateway: FleetProcess, **labels: str) -> None:
    """The alert about a silent TCP fires in time."""

    def is_firing() -> bool:
        alerts = json.loads(get_text(f"{gateway.url}/alerts"))["alerts"]
        return any(
            each["alert"] == "BatonTransportMismatch"
            and each["state"] == "firing"
            and labels.items() <= each["labels"].items()
            for each in alerts
        )

    wait_until(is_firing, MISMATCH_WITHIN_S, lambda: get_text(f"{gateway.url}/alerts"))
