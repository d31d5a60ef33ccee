"""`baton explain`: layers, as a line and as bars."""

from __future__ import annotations

import io

import msgspec
import pytest

from baton.cli.main import run
from baton.ops.explain import print_trace
from baton.protocol.request_traces import RequestTrace
from baton.telemetry.timeline import Lane, LayerTransfer, Stage
from baton.telemetry.trace import RequestSpan

SPAN = RequestSpan(request_id="r", worker="gateway", epoch="e", role="gateway")
TRACE = RequestTrace(
    id="r", status=200, placement=(), summary=None, gateway=SPAN, decode=None, prefill=None,
    missing=(),
    timeline=(
        Lane("gateway", "gateway", 0.0, 1.0, (Stage("wait", 0.0, 1.0),), None),
        Lane("transfer", "p → d", 0.5, 0.9, (Stage("transfer", 0.5, 0.9),), None),
        Lane("decode", "d", 0.9, 1.0, (Stage("decode", 0.9, 1.0),), None),
    ),
    layers=(
        LayerTransfer(0, 0.5, 0.51), LayerTransfer(1, 0.6, 0.9), LayerTransfer(2, 0.7, 0.72),
    ),
)  # fmt: skip


def draw(trace: RequestTrace, *, with_layers: bool) -> list[str]:
    out = io.StringIO()
    print_trace(trace, out, with_layers=with_layers)
    return out.getvalue().splitlines()


def test_the_slowest_layer_is_named() -> None:
    lines = draw(TRACE, with_layers=False)
    assert (
        "layers from computed to landed: 3, median 20.00 ms, longest 300.00 ms (layer 1)" in lines
    )
    assert not [line for line in lines if line.strip().startswith("layer 1")]


def test_each_layer_is_a_bar_within_the_transfer() -> None:
    names = [line[:44].split() for line in draw(TRACE, with_layers=True)]
    stages = [" ".join(each) for each in names]
    begin = next(n for n, stage in enumerate(stages) if "transfer" in stage and "→" in stage)
    drawn = stages[begin + 1 : begin + 4]
    assert [stage[:7] for stage in drawn] == ["layer 0", "layer 1", "layer 2"]
    assert stages[begin + 4].startswith("d decode")


def test_without_layers_there_is_no_line_of_them() -> None:
    assert "layers" not in "".join(
        draw(msgspec.structs.replace(TRACE, layers=()), with_layers=True)
    )


def test_text_of_clients_and_workers_cannot_steer_the_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;x\x07\x9b1m\nb[bold]"
    span = msgspec.structs.replace(SPAN, outcome=hostile, fallbacks=[hostile], peer=hostile)
    lane = Lane("decode", hostile, 0.9, 1.0, (Stage(hostile, 0.9, 1.0),), None)
    trace = msgspec.structs.replace(
        TRACE, model=hostile, gateway=span, kept=hostile, missing=(hostile,), placement=(hostile,),
        timeline=(*TRACE.timeline, lane),
    )  # fmt: skip
    lines = draw(trace, with_layers=True)
    assert all(line.isprintable() for line in lines)
    assert any("[bold]" in line for line in lines)


def test_what_the_link_has_lost_is_stated() -> None:
    trace = msgspec.structs.replace(TRACE, lost_share=0.0123)
    assert any(
        line.startswith("1.23% of the TCP segments") for line in draw(trace, with_layers=False)
    )
    assert not any("TCP segments" in line for line in draw(TRACE, with_layers=False))


@pytest.mark.parametrize("command", [("explain",), ("route", "explain", "--request-id")])
@pytest.mark.parametrize("garbage", ["", "\udcff", "\x1b[2J", "ü"])
def test_what_is_no_requests_id_is_refused(command, garbage, capsys) -> None:
    assert run([*command, garbage]) == 2
    error = capsys.readouterr().err
    assert "is no request's id" in error
    assert error.rstrip("\n").isprintable()
