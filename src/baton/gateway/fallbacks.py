"""Why a request was not served as intended."""

from __future__ import annotations

from enum import StrEnum


class FallbackCause(StrEnum):
    """Why a request was not served in the way that was intended for it."""

    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_LOST = "prefill_lost"
    PREFILL_OVERLOADED = "prefill_overloaded"
    PREFILL_REJECTED = "prefill_rejected"
    PREFILL_FAILED = "prefill_failed"
    HANDOFF_FAILED = "handoff_failed"
    PREFILL_UNAVAILABLE = "prefill_unavailable"
    DECODE_UNREACHABLE = "decode_unreachable"
    DECODE_LOST = "decode_lost"
    DECODE_FAILED = "decode_failed"
    CONTEXT_TOO_SMALL = "context_too_small"
    STALE_TICKET = "stale_ticket"
    TICKET_REFUSED = "ticket_refused"
    MODE_UNUSABLE = "mode_unusable"
