"""How KV gets from one worker to another, for one request: the operator's word, or the policy's.

    the operator named a mode ──► it, or the next that both workers know, and why not
    auto: decode has room, or nothing is known of it ──► push
          decode is short of blocks, or has a queue:
              prefill has blocks to spare ──► reference (one host), else pull
              prefill is short as well    ──► pool, else push

Push reserves blocks on decode for as long as prefill takes; where those are what is short, the KV
waits at prefill instead, or between the two. A mode that has failed this request is not chosen
again. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from baton.record import Record

if TYPE_CHECKING:
    from baton.auth.ticket import HandoffMode
    from baton.protocol.worker_http import WorkerLoad
    from baton.router.fleet import WorkerView
    from baton.router.placement import PlacementRequest

ModeSetting: TypeAlias = Literal["auto", "push", "pull", "pool", "reference", "colocated"]

SHORT_PROMPT_TOKENS: Final = 256
"""So few are sent in one piece, by push: there is nothing to save by waiting."""

MIN_FREE_FRACTION: Final = 0.25
"""Of prefill's blocks: what must stay free beside a prompt that is held there."""

_FALLBACK_ORDER: Final[tuple[HandoffMode, ...]] = ("push", "pull", "pool", "reference")


class ModeChoice(Record, frozen=True):
    """A mode, one readable line for each reason, and whether it is not the one that was wanted.

    `mode` None: no mode is left, and decode computes the prompt.
    """

    mode: HandoffMode | None
    reasons: tuple[str, ...]
    is_degraded: bool = False


def choose_mode(
    prefill: WorkerView, decode: WorkerView, request: PlacementRequest, setting: ModeSetting
) -> ModeChoice:
    """The mode for a request of these two workers; `setting` is not "colocated"."""
    wanted = _choose(prefill, decode, request, setting)
    obstacle = _why_not(wanted.mode, prefill, decode, request)
    if obstacle is None:
        return wanted
    usable = (m for m in _FALLBACK_ORDER if _why_not(m, prefill, decode, request) is None)
    return ModeChoice(next(usable, None), (*wanted.reasons, obstacle), is_degraded=True)


def _choose(
    prefill: WorkerView, decode: WorkerView, request: PlacementRequest, setting: ModeSetting
) -> ModeChoice:
    if setting not in {"auto", "colocated"}:
        return ModeChoice(setting, (f"the operator chose {setting}",))  # type: ignore[arg-type]
    num_tokens = request.num_prompt_tokens
    if num_tokens < SHORT_PROMPT_TOKENS:
        return ModeChoice("push", (f"a short prompt, of about {num_tokens} tokens",))
    decode_pressure = _describe_decode_pressure(decode, num_tokens)
    if decode_pressure is None:
        return ModeChoice("push", (f"{decode.id} has room, as far as is known",))
    return _choose_under_pressure(prefill, decode, num_tokens, decode_pressure)


def _choose_under_pressure(
    prefill: WorkerView, decode: WorkerView, num_tokens: int, decode_pressure: str
) -> ModeChoice:
    known = prefill.modes & decode.modes
    prefill_pressure = _describe_prefill_pressure(prefill, num_tokens)
    if prefill_pressure is not None:
        return ModeChoice(
            "pool" if "pool" in known else "push", (decode_pressure, prefill_pressure)
        )
    if "reference" in known and prefill.host == decode.host:
        return ModeChoice("reference", (decode_pressure, f"both are on {prefill.host}"))
    return ModeChoice("pull" if "pull" in known else "push", (decode_pressure,))


def _why_not(
    mode: HandoffMode | None, prefill: WorkerView, decode: WorkerView, request: PlacementRequest
) -> str | None:
    """Why a mode cannot be used; None if it can."""
    if mode in request.failed_modes:
        return f"{mode} has just failed this request, or is not for it"
    for worker in (prefill, decode):
        if mode not in worker.modes:
            return f"{worker.id} does not know the mode {mode}"
    if mode == "reference" and prefill.host != decode.host:
        return f"{prefill.id} and {decode.id} are not on one host"
    return None


def _describe_decode_pressure(decode: WorkerView, num_tokens: int) -> str | None:
    load = decode.load
    if load is None:
        return None
    if load.num_waiting:
        return f"{decode.id} has {load.num_waiting} requests in its queue"
    if load.num_free_blocks < _count_blocks(load, num_tokens):
        return f"{decode.id} has {_free_text(load)}, too few for about {num_tokens} tokens"
    return None


def _describe_prefill_pressure(prefill: WorkerView, num_tokens: int) -> str | None:
    """Why a prompt should not wait there once it is computed."""
    load = prefill.load
    if load is None:
        return None
    left = load.num_free_blocks - _count_blocks(load, num_tokens)
    if left < MIN_FREE_FRACTION * load.num_blocks:
        return f"{prefill.id} has {_free_text(load)}: a prompt that waits there would be in the way"
    return None


def _count_blocks(load: WorkerLoad, num_tokens: int) -> int:
    return -(-num_tokens // load.block_size)


def _free_text(load: WorkerLoad) -> str:
    return f"{load.num_free_blocks} of {load.num_blocks} blocks free"
