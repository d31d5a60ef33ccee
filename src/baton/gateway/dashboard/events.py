"""What the events of `/dashboard/events` have. JSON; the page's modules read the same names."""

from __future__ import annotations

import msgspec

from baton.gateway.debug import LinkListReply, WorkerListReply
from baton.gateway.queue_page import QueueReply
from baton.gateway.store_page import FleetStore
from baton.protocol.alerts import AlertList


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One second. Rates are per second; durations in seconds, None where no answer ended.

    `ttft_*`, `tpot_*` and the three parts of TTFT (means) are those of streamed answers that ended
    in this second, of at most 512 a model; tokens are those of all answers. `waited_s`: in the
    gateway's queue. `prefill_s`: from there until the prompt was computed, the worker's queue
    included. `handoff_s`: from there to the first token: KV that was still moving, and the first
    decode step.
    """

    at: float
    requests: float
    failed: float
    num_inflight: int
    num_waiting: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    waited_s: float | None
    prefill_s: float | None
    handoff_s: float | None
    computed_tokens: float
    cached_tokens: float
    answer_tokens: float


class History(msgspec.Struct, frozen=True):
    """The first event: the names of a point's fields in order, and the latest points."""

    fields: tuple[str, ...]
    points: tuple[Point, ...]


class RecentRequest(msgspec.Struct, frozen=True):
    """One of the latest requests. Durations in seconds from its arrival at the gateway."""

    id: str
    status: int
    mode: str | None
    outcome: str | None
    workers: str | None
    waited_s: float
    first_token_s: float | None
    total_s: float | None


class ModelShown(msgspec.Struct, frozen=True):
    """`found_share`: of the latest prompts' tokens, those that were cached where computed."""

    model: str
    found_share: float


class TargetShown(msgspec.Struct, frozen=True):
    """Requests of one model that ended in the last `window_s`, and those that missed a target.

    `objective`: `ttft`, `tpot` or `itl`; as BatonBurnRate* count them (`TargetMetrics`).
    """

    model: str
    objective: str
    target_s: float
    window_s: float
    num: int
    num_missed: int


class TokenCost(msgspec.Struct, frozen=True):
    """What 1,000 tokens cost in the last minute, in the unit of `scaling.price_*`; None: no tokens.

    Input tokens include those that were cached. `workers_per_hour`: all workers together.
    """

    workers_per_hour: float
    input_per_1000: float | None
    output_per_1000: float | None


class Tick(msgspec.Struct, frozen=True):
    """Once a second: everything that changes quickly. `num_hidden` workers are not listed."""

    version: str
    point: Point
    workers: WorkerListReply
    num_hidden: int
    queue: QueueReply
    models: tuple[ModelShown, ...]
    targets: tuple[TargetShown, ...]
    requests: tuple[RecentRequest, ...]
    cost: TokenCost | None
    alerts: AlertList


class PairShown(msgspec.Struct, frozen=True):
    """Handoffs of one prefill and one decode worker in the last `window_s`; see `PairHandoffs`."""

    prefill: str
    decode: str
    distance: str
    transport: str
    mode: str
    operation: str
    num: int
    num_bytes: int
    transfer_p50_s: float | None
    s_per_mib_p50: float | None
    exposed_share_p50: float | None
    num_mismatches: int
    expected_transport: str | None


class DistanceShown(msgspec.Struct, frozen=True):
    """All handoffs at one distance over one transport in the last `window_s`."""

    distance: str
    transport: str
    num_pairs: int
    num: int
    num_bytes: int
    transfer_p50_s: float | None
    transfer_p99_s: float | None
    bytes_per_s_p50: float | None
    exposed_share_p50: float | None


class DriftShown(msgspec.Struct, frozen=True):
    """A link's recent time for each byte, over what it was at first."""

    worker: str
    peer: str
    transport: str
    operation: str
    state: str
    ratio: float


class LossShown(msgspec.Struct, frozen=True):
    """TCP segments that one worker sent to another in the last `window_s`; see `PairSegments`."""

    sender: str
    receiver: str
    transport: str
    num: int
    lost_share: float


class TransfersShown(msgspec.Struct, frozen=True):
    """What `/debug/transfers` has: pairs with the most bytes in the last `window_s`; the store."""

    window_s: float
    pairs: tuple[PairShown, ...]
    distances: tuple[DistanceShown, ...]
    drifts: tuple[DriftShown, ...]
    losses: tuple[LossShown, ...]
    store: FleetStore
    num_left_out: int


class Links(msgspec.Struct, frozen=True):
    """Every few seconds: what handoffs cost, measured links, transfers by pair of workers."""

    links: LinkListReply
    transfers: TransfersShown
