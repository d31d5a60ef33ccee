"""`GET /debug/demand`: what a gateway's clients ask for, as an autoscaler reads it."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from baton.protocol.worker_http import Name

MAX_MODELS = 1024
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
_Some: TypeAlias = Annotated[float, Meta(gt=0, le=1e6)]


class RequestShape(msgspec.Struct, frozen=True):
    """What one of the latest requests costs on the average, as the gateway has learned it.

    `prefill_s` and `handoff_s` are of the tokens that were not cached. A decode step takes
    `step_s + step_answer_s * answers`. A worker has room for the KV of `most_at_once` requests;
    None: it does not report that.
    """

    prefill_s: _Some
    handoff_s: _Seconds
    num_answer_tokens: Annotated[float, Meta(ge=1, le=1e9)]
    step_s: _Seconds
    step_answer_s: _Seconds
    most_at_once: Annotated[float, Meta(ge=1)] | None


class EndedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What a client saw of one answer."""

    ttft_s: _Seconds
    tpot_s: _Seconds


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One model, at one gateway.

    `num_begun` counts requests given to workers since the gateway started, `num_waiting` those that
    wait in it now. `ended`: the answers that ended within the last `window_s`. `shape` is None
    until enough of them have.
    """

    model: Name
    num_begun: _Count
    num_waiting: _Count
    window_s: _Some
    ended: Annotated[tuple[EndedAnswer, ...], Meta(max_length=4096)]
    shape: RequestShape | None


class DemandReport(msgspec.Struct, frozen=True):
    """All models of a gateway. `epoch` is that of the gateway's present incarnation."""

    epoch: Name
    models: Annotated[tuple[ModelDemand, ...], Meta(max_length=MAX_MODELS)]
