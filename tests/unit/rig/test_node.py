"""How long a node measures, and how it reports what went wrong."""

from types import SimpleNamespace

import pytest

from baton.errors import ConfigError, TransferError
from baton.rig import node
from baton.rig.backend import Measure
from baton.rig.node import NodeServer, describe_error
from baton.rig.pages import PAGE_BYTES, Workload


class SlowLink:
    """A backend of which each transfer takes 20 ms, and the time by which it does."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s

    def prepare(self, move, direction):
        return self._move

    def _move(self):
        self.now_s += 0.02


@pytest.mark.parametrize(("most_s", "num_samples"), [(0.03, 2), (0.001, 1), (9.0, 5)])
def test_a_slow_link_has_fewer_samples_but_one(monkeypatch, most_s, num_samples):
    monkeypatch.setattr(node, "MOST_MEASURING_S", most_s)
    link = SlowLink()
    time = SimpleNamespace(perf_counter=link.perf_counter, process_time=lambda: 0.0)
    monkeypatch.setattr(node, "time", time)
    server = NodeServer(None, None, None)
    server._built, server._num_pages = link, 8
    measured = server._measure(Measure(Workload("message", PAGE_BYTES), "push", 0.001, 5, 9))
    assert len(measured.samples_s) == num_samples


def test_errors_in_one_line():
    assert describe_error(TransferError("no\n  way")) == "no way"
    assert describe_error(ConfigError("no such option")) == "no such option"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(TransferError()) == "TransferError: "
