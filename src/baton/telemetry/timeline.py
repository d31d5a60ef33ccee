"""The spans of one request on one time axis: seconds since the gateway received it. Pure.

    lane      who recorded it                    its stages, in order
    gateway   the gateway                        admit, tokenize, queue, place, wait, answer
    prefill   the worker that computes           tokenize, queue, prefill (its chunks within)
    transfer  the decode worker                  transfer behind prefill, exposed transfer
    decode    the worker that answers            tokenize, reserve, prefill of what is not handed
                                                 over, accept, queue, first step, then decode

Spans of workers are on their own clocks. They are shifted by the offset that the gateway has
measured. Where it has measured none, or the shifted span is not within the request, as after a jump
of that clock, the span's beginning is put at the placement, and `Lane.clock` is None.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from baton.telemetry.clock_offset import ClockEstimate
from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

LaneName: TypeAlias = Literal["gateway", "prefill", "transfer", "decode"]

TOLERANCE_S: Final = 0.5
"""A worker may end its span so much later than the gateway, or have a clock so much off."""

_GATEWAY_STAGES: Final = (
    ("admit", Stamp.ADMITTED),
    ("tokenize", Stamp.TOKENIZED),
    ("queue", Stamp.DEQUEUED),
    ("place", Stamp.PLACED),
    ("wait", Stamp.FIRST_TOKEN),
    ("answer", Stamp.FINISHED),
)
_DECODE_STAGES: Final = (
    ("accept", Stamp.LAST_LAYER_LANDED, Stamp.KV_READY),
    ("queue", Stamp.KV_READY, Stamp.DECODE_SCHEDULED),
    ("first step", Stamp.DECODE_SCHEDULED, Stamp.FIRST_TOKEN),
    ("decode", Stamp.FIRST_TOKEN, Stamp.FINISHED),
)


class Stage(msgspec.Struct, frozen=True):
    """`is_part`: within the stage before it that is none."""

    name: str
    start_s: float
    end_s: float
    is_part: bool = False


class Lane(msgspec.Struct, frozen=True):
    """What one process did. `clock` of the gateway itself is exact."""

    name: LaneName
    worker: str
    start_s: float
    end_s: float
    stages: tuple[Stage, ...]
    clock: ClockEstimate | None


class LayerTransfer(msgspec.Struct, frozen=True):
    """One layer's KV: when the last of it was computed, and when all of it had landed."""

    layer: int
    ready_s: float
    landed_s: float


class WorkerTrace(msgspec.Struct, frozen=True):
    """A worker's span, and how far its clock is from the gateway's, if that is known.

    Of a server with several ranks the span is that of all but `missing_ranks`.
    """

    span: RequestSpan
    clock: ClockEstimate | None
    missing_ranks: tuple[int, ...] = ()


def make_timeline(
    gateway: RequestSpan, decode: WorkerTrace | None, prefill: WorkerTrace | None
) -> tuple[Lane, ...]:
    """The lanes of which something is known, in the order in which a request goes through them.

    `decode` is the worker that answered. If it computed the prompt, too, it has both lanes.
    """
    origin = gateway.stamps.get(Stamp.RECEIVED)
    if origin is None:
        return ()
    own = _Axis(origin, ClockEstimate(0.0, 0.0))
    found = [_make_lane("gateway", gateway, own, list(_gateway_stages(gateway, own)))]
    if decode is not None:
        axis = _align(gateway, decode)
        if prefill is not None:
            found.append(_prefill_lane(prefill.span, _align(gateway, prefill)))
        else:
            found.append(_prefill_lane(decode.span, axis))
        found.append(_transfer_lane(decode.span, axis))
        found.append(_make_lane("decode", decode.span, axis, list(_decode_stages(decode, axis))))
    elif prefill is not None:
        found.append(_prefill_lane(prefill.span, _align(gateway, prefill)))
    return tuple(lane for lane in found if lane is not None)


def list_layers(
    gateway: RequestSpan, decode: WorkerTrace | None, prefill: WorkerTrace | None
) -> tuple[LayerTransfer, ...]:
    """The layers of which both workers have recorded when they were ready and had landed."""
    if decode is None or prefill is None or Stamp.RECEIVED not in gateway.stamps:
        return ()
    ready, landed = prefill.span.layers_ready, decode.span.layers_landed
    if len(ready) != len(landed):
        return ()
    sender, receiver = _align(gateway, prefill), _align(gateway, decode)
    found = []
    for layer, (ready_at, landed_at) in enumerate(zip(ready, landed, strict=True)):
        if ready_at and landed_at:
            landed_s = receiver.place(landed_at)
            # Instants of two hosts: an error of the clocks' offset is not a time.
            found.append(LayerTransfer(layer, min(sender.place(ready_at), landed_s), landed_s))
    return tuple(found)


class _Axis(msgspec.Struct, frozen=True):
    """From a process's clock to seconds since the gateway received the request."""

    origin: float
    clock: ClockEstimate | None

    def place(self, at: float) -> float:
        return at - self.origin


def _align(gateway: RequestSpan, worker: WorkerTrace) -> _Axis:
    received, clock = gateway.stamps[Stamp.RECEIVED], worker.clock
    stamps = worker.span.stamps
    first = stamps.get(Stamp.RECEIVED, min(stamps.values(), default=received))
    if clock is not None:
        axis = _Axis(received + clock.offset_s, clock)
        slack_s = clock.error_s + TOLERANCE_S
        until = gateway.stamps.get(Stamp.FINISHED)
        is_late = until is not None and axis.place(first) > until - received + slack_s
        if axis.place(first) >= -slack_s and not is_late:
            return axis
    placed = gateway.stamps.get(Stamp.PLACED, received)
    return _Axis(first - (placed - received), None)


def _gateway_stages(span: RequestSpan, axis: _Axis) -> Iterator[Stage]:
    last = span.stamps[Stamp.RECEIVED]
    for name, stamp in _GATEWAY_STAGES:
        at = span.stamps.get(stamp)
        if at is not None and at >= last:
            yield Stage(name, axis.place(last), axis.place(at))
            last = at


def _prefill_lane(span: RequestSpan, axis: _Axis) -> Lane | None:
    """Of a decode worker that got its KV from a peer: as far as the peer reported it."""
    is_own = span.role != "decode" or Stamp.KV_READY not in span.stamps
    stamps = span.stamps if is_own else span.peer_stamps
    stages: list[Stage] = []
    received, started = stamps.get(Stamp.RECEIVED), stamps.get(Stamp.PREFILL_STARTED)
    if received is not None and is_own and span.tokenize_s is not None:
        until = received + span.tokenize_s
        stages.append(Stage("tokenize", axis.place(received), axis.place(until)))
        received = until
    if received is not None and started is not None and started >= received:
        stages.append(Stage("queue", axis.place(received), axis.place(started)))
    done = stamps.get(Stamp.PREFILL_DONE)
    if done is None and span.role == "colocated":
        done = stamps.get(Stamp.FIRST_TOKEN)
    if started is not None and done is not None and done >= started:
        stages.append(Stage("prefill", axis.place(started), axis.place(done)))
        if is_own:
            stages.extend(
                Stage(
                    f"chunk of {each.num_tokens} tokens",
                    axis.place(max(each.started_at, started)),
                    axis.place(min(each.ended_at, done)),
                    is_part=True,
                )
                for each in span.chunks
                if started <= each.ended_at and each.started_at < done
            )
    worker = span.worker if is_own else span.peer or "prefill"
    return _make_lane("prefill", span, axis, stages, worker=worker)


def _transfer_lane(span: RequestSpan, axis: _Axis) -> Lane | None:
    """From the first layer's KV being ready until the last has landed; what prefill hid of it."""
    ready = span.peer_stamps.get(Stamp.FIRST_LAYER_READY, span.stamps.get(Stamp.GRANTED))
    landed, done = (
        span.stamps.get(Stamp.LAST_LAYER_LANDED),
        span.peer_stamps.get(Stamp.PREFILL_DONE),
    )
    if ready is None or landed is None or landed < ready:
        return None
    hidden_until = landed if done is None else min(max(done, ready), landed)
    stages = [Stage("transfer", axis.place(ready), axis.place(hidden_until))]
    if hidden_until < landed:
        stages.append(Stage("exposed transfer", axis.place(hidden_until), axis.place(landed)))
    worker = f"{span.peer or 'prefill'} → {span.worker}"
    return _make_lane("transfer", span, axis, stages, worker=worker)


def _decode_stages(decode: WorkerTrace, axis: _Axis) -> Iterator[Stage]:
    span = decode.span
    if span.role == "decode":
        received, reserved = span.stamps.get(Stamp.RECEIVED), span.stamps.get(Stamp.PAGES_RESERVED)
        if received is not None and span.tokenize_s is not None:
            until = received + span.tokenize_s
            yield Stage("tokenize", axis.place(received), axis.place(until))
            received = until
        if received is not None and reserved is not None and reserved >= received:
            yield Stage("reserve", axis.place(received), axis.place(reserved))
    stages: tuple[tuple[str, Stamp, Stamp], ...] = _DECODE_STAGES
    if span.role == "decode" and Stamp.KV_READY in span.stamps:  # what was not handed over
        stages = (("prefill", Stamp.PREFILL_STARTED, Stamp.PREFILL_DONE), *stages)
    # It is computed while KV lands, or afterwards.
    for name, begin, end in sorted(stages, key=lambda stage: span.stamps.get(stage[2], inf)):
        start, stop = span.stamps.get(begin), span.stamps.get(end)
        if start is not None and stop is not None and stop >= start:
            yield Stage(name, axis.place(start), axis.place(stop))


def _make_lane(
    name: LaneName, span: RequestSpan, axis: _Axis, stages: list[Stage], *, worker: str = ""
) -> Lane | None:
    """Stages that follow one another: one begins no earlier than the one before it ends."""
    in_order: list[Stage] = []
    until_s = float("-inf")
    for stage in stages:
        if stage.is_part:
            in_order.append(stage)
        elif stage.end_s >= until_s:
            in_order.append(msgspec.structs.replace(stage, start_s=max(stage.start_s, until_s)))
            until_s = stage.end_s
    if not in_order:
        return None
    who = worker or span.worker
    return Lane(name, who, in_order[0].start_s, until_s, tuple(in_order), axis.clock)


class ComparedTime(msgspec.Struct, frozen=True):
    """A predicted part of a request's time, and what it was; None where that is not known."""

    part: Literal["queue", "prefill", "handoff", "ttft"]
    predicted_s: float
    actual_s: float | None


def compare_prediction(gateway: RequestSpan, lanes: tuple[Lane, ...]) -> tuple[ComparedTime, ...]:
    """The router's prediction beside what happened, as the router counts its parts.

    `queue`: from the placement until prefill begins. `prefill`: loads from the store included, and
    of a prompt that two workers share both parts.
    `handoff`: from then until the first token, the decode worker's queue included; of an answer in
    one piece by the clock of the worker that answered.
    """
    predicted = gateway.predicted
    origin, placed = gateway.stamps.get(Stamp.RECEIVED), gateway.stamps.get(Stamp.PLACED)
    if predicted is None or origin is None or placed is None:
        return ()
    first = gateway.stamps.get(Stamp.FIRST_TOKEN)
    placed_s = placed - origin
    first_s = _find_first_token(lanes) if first is None else first - origin
    computed = [s for lane in lanes for s in lane.stages if s.name == "prefill"]
    begun_s = min((stage.start_s for stage in computed), default=None)
    done_s = max((stage.end_s for stage in computed), default=None)
    if computed and not any(lane.name == "transfer" for lane in lanes):
        done_s = first_s
    return (
        ComparedTime("queue", predicted.queue_s, _gap(placed_s, begun_s)),
        ComparedTime("prefill", predicted.load_s + predicted.prefill_s, _gap(begun_s, done_s)),
        ComparedTime(
            "handoff", predicted.handoff_s + predicted.decode_queue_s, _gap(done_s, first_s)
        ),
        ComparedTime("ttft", predicted.ttft_s, _gap(placed_s, first_s)),
    )


def _find_first_token(lanes: tuple[Lane, ...]) -> float | None:
    """By the worker that answered, if its clock is known."""
    answered = (lane for lane in lanes if lane.name == "decode" and lane.clock is not None)
    stages = (stage for lane in answered for stage in lane.stages)
    return next((stage.start_s for stage in stages if stage.name == "decode"), None)


def _gap(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
