"""Which SIGTERM is a parent's second one."""

from __future__ import annotations

import ctypes
import os
import signal

from baton.net.http_server import ignore_relayed

PR_SET_PDEATHSIG = 1


def test_a_signal_is_relayed_by_a_parent_that_lives_alone(monkeypatch):
    prctl = ctypes.CDLL(None).prctl
    assert not ignore_relayed(signal.SIGTERM)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        assert ignore_relayed(signal.SIGTERM)
        assert not ignore_relayed(signal.SIGINT)
        # The kernel keeps what was set once the parent is gone, and somebody else asks.
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert not ignore_relayed(signal.SIGTERM)
    finally:
        prctl(PR_SET_PDEATHSIG, 0)
