"""Two agents, a transport that spoils pages, and a receiver that looks at all, some, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.handoff import write_batches
from baton.handoff.interface import KVFailed, KVLanded
from baton.handoff.verify import VerificationPolicy
from baton.handoff.write_batches import DigestedInCopy
from baton.testing.faulty_transport import Fault, FaultPlan, FaultyTransport
from tests.integration.handoff_nodes import make_handoff, node

if TYPE_CHECKING:
    from baton.handoff.interface import HandoffEvent
    from baton.transfer.interface import Transport
    from tests.integration.handoff_nodes import Handoff

NUM_TOKENS = 96
KINDS = {"same_host": "shared", "network": "tcp"}


class Spoiler:
    """Wraps the sender's transport: spoils its first writes, and keeps it for the proof."""

    def __init__(self, fault: Fault, num_faults: int) -> None:
        self._plan = FaultPlan(seed=5, rates={fault: 1.0}, max_faults=num_faults)
        self.transport: FaultyTransport | None = None

    def __call__(self, transport: Transport) -> FaultyTransport:
        self.transport = FaultyTransport(transport, self._plan)
        return self.transport

    @property
    def num_injected(self) -> int:
        assert self.transport is not None
        return self.transport.injected.total()


def hand_over(
    path: str, policy: VerificationPolicy, spoiler: Spoiler
) -> tuple[Handoff, HandoffEvent, bool]:
    """One handoff; how it ended on the decode worker, and whether the bytes are the sender's."""
    key, kinds = Credentials.generate(), (KINDS[path],)
    with (
        node("p", kinds=kinds, key=key, wrap=spoiler) as prefill,
        node("d", kinds=kinds, key=key, verification=policy) as decode,
    ):
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS)
        handoff.start_receive()
        handoff.start_send()
        handoff.compute(NUM_TOKENS)
        handoff.prefill_done()
        (event,) = decode.wait_for()[:1]
        try:
            handoff.check_bytes()
        except AssertionError:
            return handoff, event, False
        return handoff, event, True


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize(
    "fault", [Fault.FLIP_BIT, Fault.ZERO_PAGE, Fault.SWAP_PAGES, Fault.TRUNCATE]
)
def test_full_finds_what_was_spoilt(path: str, fault: Fault) -> None:
    spoiler = Spoiler(fault, 1)
    handoff, event, _ = hand_over(path, VerificationPolicy(), spoiler)
    assert spoiler.num_injected == 1
    assert isinstance(event, KVFailed)
    assert event.error.stage == "verify"
    assert handoff.receiving.trace.digest_failures == {KINDS[path]: 1}


@pytest.mark.parametrize(
    "fault", [None, Fault.FLIP_BIT, Fault.ZERO_PAGE, Fault.SWAP_PAGES, Fault.TRUNCATE]
)
def test_full_finds_what_was_spoilt_in_a_copy_that_was_digested(
    fault: Fault | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's digests are of its own pages, whatever the transport copied in their place."""
    made: list[int] = []
    finish = DigestedInCopy.finish

    def count(digested: DigestedInCopy) -> bytes:
        made.append(digested.batch.copies.num_layers)
        return finish(digested)

    monkeypatch.setattr(DigestedInCopy, "finish", count)
    monkeypatch.setattr(write_batches, "MIN_DIGESTED_PAGE_BYTES", 0)
    spoiler = Spoiler(fault or Fault.FLIP_BIT, 0 if fault is None else 1)
    handoff, event, is_right = hand_over("same_host", VerificationPolicy(), spoiler)
    assert made
    if fault is None:
        assert isinstance(event, KVLanded)
        assert is_right
        assert handoff.receiving.trace.verified_bytes["shared"] == handoff.receiving.trace.num_bytes
        return
    assert spoiler.num_injected == 1
    assert isinstance(event, KVFailed)
    assert event.error.stage == "verify"
    assert handoff.receiving.trace.digest_failures == {"shared": 1}


@pytest.mark.parametrize("path", KINDS)
def test_identity_wants_no_digests_and_sees_no_bytes(path: str) -> None:
    """The documented risk is real; whose KV it is, is checked all the same."""
    spoiler = Spoiler(Fault.FLIP_BIT, 1)
    policy = VerificationPolicy(same_host="identity", network="identity")
    handoff, event, is_right = hand_over(path, policy, spoiler)
    assert spoiler.num_injected == 1
    assert isinstance(event, KVLanded)
    assert not is_right
    assert handoff.receiving.trace.verified_bytes == {}


@pytest.mark.parametrize("path", KINDS)
def test_a_level_is_that_of_its_path(path: str) -> None:
    other = {"same_host": "network", "network": "same_host"}[path]
    spoiler = Spoiler(Fault.FLIP_BIT, 1)
    handoff, event, _ = hand_over(path, VerificationPolicy(**{other: "identity"}), spoiler)
    assert isinstance(event, KVFailed)
    assert handoff.receiving.trace.verified_bytes[KINDS[path]] > 0


def test_sampled_finds_what_is_spoilt_throughout_and_looks_at_a_part() -> None:
    policy = VerificationPolicy(network="sampled", share=0.2)
    spoiler = Spoiler(Fault.FLIP_BIT, 0)
    handoff, event, is_right = hand_over("network", policy, spoiler)
    assert isinstance(event, KVLanded)
    assert is_right
    total = handoff.receiving.trace.num_bytes
    assert 0 < handoff.receiving.trace.verified_bytes["tcp"] < total
    # One spoilt page of all that are written together: found by a handoff in six or so.
    assert any(
        isinstance(hand_over("network", policy, Spoiler(Fault.FLIP_BIT, 1 << 30))[1], KVFailed)
        for _ in range(100)
    )
