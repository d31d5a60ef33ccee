"""Blocks in an order to the store, and their engine that takes them back."""

from __future__ import annotations

import threading

import pytest

from baton.errors import StoreError
from baton.handoff.block_guard import BlockGuard


def test_blocks_that_were_taken_back_are_not_accessed() -> None:
    guard = BlockGuard()
    for _ in range(2):
        with guard:
            pass
    guard.revoke()
    guard.revoke()
    for _ in range(2):
        with pytest.raises(StoreError, match="taken back"), guard:
            raise AssertionError("it was entered")


def test_taking_back_waits_for_the_access_that_is_under_way() -> None:
    guard, events = BlockGuard(), []

    def revoke() -> None:
        guard.revoke()
        events.append("revoked")

    with guard:
        thread = threading.Thread(target=revoke)
        thread.start()
        thread.join(0.05)
        events.append("accessed")
    thread.join(30)
    assert events == ["accessed", "revoked"]
