"""Until when each side of a handoff waits for the other: pure.

    decode   ├ expected ── timeout_s ──┤
    prefill's engine:  ● sign of life ── timeout_s ──┤
                            ● another ── timeout_s ──┤
                                 ▲ Keepalive: it has this prompt queued, or computes it

`handoff.timeout_s` is for what a handoff does itself. For as long as the prefill worker's engine
shows that it computes, and has the prompt in its queue or under way, both sides wait until
`timeout_s` after its last sign of life, but never beyond the deadline of the request. An engine
without progress, be it stopped, stuck or gone, is waited for no longer than that, even if other
threads of its process still send. Once the prompt is computed, engine heartbeats no longer move the
deadline: its transfer has `timeout_s`.
"""

from __future__ import annotations

from baton.clock import Instant


def extend(deadline: Instant, wanted: Instant, limit: Instant) -> Instant:
    """The later of a deadline and what is wanted, as far as the limit allows. Never earlier."""
    return Instant(max(deadline, min(wanted, limit)))
