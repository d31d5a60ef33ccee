"""Is what arrived what was sent? As far as the policy for its path wants to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from baton.handoff.sampler import Sampler

if TYPE_CHECKING:
    from baton.handoff.incoming import IncomingHandoff
    from baton.handoff.messages import Notification
    from baton.handoff.verification import VerificationPolicy
    from baton.transfer.interface import Transport


def verify_written(
    policy: VerificationPolicy,
    incoming: IncomingHandoff,
    notification: Notification,
    transport: Transport,
) -> bool:
    """Whether what a peer's write brought is what its sender had, as far as is looked at."""
    level = policy.level_over(transport)
    match level:
        case "identity":
            return True
        case "sampled":
            if incoming.sampler is None:
                incoming.sampler = Sampler(policy.share)
            return incoming.is_intact(notification, transport.kind, incoming.sampler)
        case "full":
            return incoming.is_intact(notification, transport.kind, None)
        case _:
            assert_never(level)


def verify_read(incoming: IncomingHandoff, notification: Notification, transport: str) -> bool:
    """Whether what a read brought is, all of it, what the peer announced.

    Whatever the policy: its pages may have changed while they were read.
    """
    return incoming.is_intact(notification, transport, None)
