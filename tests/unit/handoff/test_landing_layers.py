"""`LandingLayers`: one thread counts layers, another waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from baton.handoff.interface import LandingLayers

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_S = 60.0


class WatchedCondition(threading.Condition):
    """Its `num_waiting` grows under the lock, before a thread lets go of it to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = 0
        self.begun = threading.Condition()

    def wait(self, timeout: float | None = None) -> bool:
        with self.begun:
            self.num_waiting += 1
            self.begun.notify_all()
        return super().wait(timeout)

    def await_waiting(self, num: int) -> None:
        """Until so many waits have begun."""
        with self.begun:
            assert self.begun.wait_for(lambda: self.num_waiting >= num, LONG_S)


@pytest.fixture(name="changed")
def changed_fixture() -> WatchedCondition:
    return WatchedCondition()


@pytest.fixture(name="layers")
def layers_fixture(changed: WatchedCondition) -> LandingLayers:
    layers = LandingLayers()
    layers._changed = changed
    return layers


def test_nothing_is_in_place_at_first() -> None:
    layers = LandingLayers()
    assert (layers.num, layers.is_over) == (0, False)
    assert not layers.wait(0, 0.0)


def test_what_is_in_place_is_waited_for_by_none(
    layers: LandingLayers, changed: WatchedCondition
) -> None:
    layers.advance(2)
    assert layers.num == 2
    assert layers.wait(0, LONG_S)
    assert layers.wait(1, LONG_S)
    assert changed.num_waiting == 0
    assert not layers.wait(2, 0.0)


def test_the_number_never_falls() -> None:
    layers = LandingLayers()
    layers.advance(3)
    layers.advance(1)
    assert layers.num == 3


def test_after_the_end_none_is_counted_and_what_is_in_place_stays(
    layers: LandingLayers, changed: WatchedCondition
) -> None:
    layers.advance(1)
    layers.end()
    layers.advance(2)
    assert (layers.num, layers.is_over) == (1, True)
    assert layers.wait(0, LONG_S)
    assert not layers.wait(1, LONG_S)
    assert changed.num_waiting == 0, "it waits for what will not come"
    layers.end()
    assert layers.is_over


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda layers: layers.advance(1), [True, False]),
        (lambda layers: layers.advance(2), [True, True]),
        (lambda layers: None, [False, False]),
    ],
)
def test_two_threads_wait_for_two_layers(
    act: Callable[[LandingLayers], None],
    found: list[bool],
    layers: LandingLayers,
    changed: WatchedCondition,
) -> None:
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(layers.wait, layer, LONG_S) for layer in (0, 1)]
        changed.await_waiting(2)
        assert not any(wait.done() for wait in waits)
        act(layers)
        layers.end()
        assert [wait.result(LONG_S) for wait in waits] == found


def test_a_wait_goes_on_until_its_own_layer_is_there(
    layers: LandingLayers, changed: WatchedCondition
) -> None:
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(layers.wait, 2, LONG_S)
        for num in (1, 2):
            changed.await_waiting(num)
            layers.advance(num)
        changed.await_waiting(3)  # woken twice, and waiting again
        assert not wait.done()
        layers.advance(3)
        assert wait.result(LONG_S)


def test_a_wait_ends_in_time() -> None:
    assert not LandingLayers().wait(0, 0.01)
