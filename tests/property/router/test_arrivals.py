"""Closed loops are told from independent arrivals by their begins and ends alone.

Requests last a second on the average; all is looked at once a second, as a division of labour does.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.arrivals import Arrivals
from tests.examples import examples

DURATIONS = {
    "constant": lambda _: 1.0,
    "between 0.5 and 1.5": lambda rng: rng.uniform(0.5, 1.5),
    "exponential": lambda rng: rng.expovariate(1.0),
    "few are long": lambda rng: rng.lognormvariate(-0.5, 1.0),
}
UNTIL_S = 60.0
SETTLED_S = 25.0
"""Windows before it are forgotten: in the first ones few are seen, and some clients begin later."""
seeds = st.integers(0, 1 << 32)
durations = st.sampled_from(sorted(DURATIONS))


class Looks:
    """What `Arrivals` makes of requests, `(begins_at, ends_at)`: times of looks."""

    def __init__(self, requests):
        self.arrivals = Arrivals()
        self.closed_at, self.open_at = [], []
        events = [(begins_at, None) for begins_at, _ in requests]
        events += [(ends_at, ends_at - begins_at) for begins_at, ends_at in requests]
        events.sort(key=lambda event: (event[0], event[1] is None))
        look_at = 1.0
        for at, lasted_s in events:
            while at > look_at and look_at <= UNTIL_S:
                self.look(look_at)
                look_at += 1.0
            if look_at > UNTIL_S:
                break
            if lasted_s is None:
                self.arrivals.begin(at, 1)
            else:
                self.arrivals.end(at, lasted_s)

    def look(self, at):
        (self.closed_at if self.arrivals.are_closed_loops else self.open_at).append(at)


def poisson(rng, per_s):
    at = rng.expovariate(per_s)
    while at < UNTIL_S:
        yield at
        at += rng.expovariate(per_s)


def bursts(rng, per_s):
    """Of eight at once, on the average."""
    for at in poisson(rng, per_s / 8):
        for _ in range(1 + int(rng.expovariate(1 / 7.5))):
            yield at


def independent(rng, begins, lasts, num_servers=None):
    """Each is served at once; or by the first of so many servers that is free."""
    free_at = [0.0] * (num_servers or 0)
    heapify(free_at)
    for at in begins:
        ends_at = (at if num_servers is None else max(at, heappop(free_at))) + lasts(rng)
        if num_servers is not None:
            heappush(free_at, ends_at)
        yield at, ends_at


def closed_loops(rng, lasts, begins, pause_s=0.0):
    """Clients, each of which pauses about `pause_s` before it asks again."""
    for first_at in begins:
        at = first_at
        while at < UNTIL_S:
            ends_at = at + lasts(rng)
            yield at, ends_at
            at = ends_at + pause_s * rng.uniform(0.5, 1.5)


def check_open(looks):
    """Few requests may look like closed loops by chance; more of them do not."""
    assert len(looks.closed_at) <= 12
    assert [at for at in looks.closed_at if at > SETTLED_S] == []


def one_by_one(num, within_s, since_s=0.0):
    return [since_s + within_s * at / num for at in range(num)]


@settings(max_examples=examples(30))
@given(seeds, durations, st.floats(1.0, 60.0), st.sampled_from([poisson, bursts]))
def test_independent_arrivals_are_not_taken_for_closed_loops(seed, lasts, per_s, arrive):
    rng = Random(seed)
    looks = Looks([*independent(rng, arrive(rng, per_s), DURATIONS[lasts])])
    check_open(looks)


@settings(max_examples=examples(20))
@given(seeds, durations, st.integers(4, 48), st.floats(0.7, 1.5))
def test_nor_near_saturation(seed, lasts, num_servers, busy):
    """Where as many are served as can be, or more come: ends have more equal intervals."""
    rng = Random(seed)
    begins = poisson(rng, busy * num_servers)
    looks = Looks([*independent(rng, begins, DURATIONS[lasts], num_servers)])
    check_open(looks)


@settings(max_examples=examples(30))
@given(seeds, durations, st.integers(4, 64), st.floats(0.0, 0.05))
def test_closed_loops_are_recognized(seed, lasts, num, pause_s):
    """Of clients that begin one after another, also where they pause for a moment."""
    rng, begins = Random(seed), one_by_one(num, 0.5)
    looks = Looks([*closed_loops(rng, DURATIONS[lasts], begins, pause_s)])
    assert max(looks.open_at) <= SETTLED_S


@settings(max_examples=examples(15))
@given(seeds, st.integers(3, 64))
def test_waves_are_no_changes(seed, num):
    """All end within some milliseconds, and all begin anew within some more."""
    rng = Random(seed)
    requests = [
        (1.02 * wave + rng.uniform(0.0, 0.01), 1.02 * wave + 1.0 + rng.uniform(0.0, 0.01))
        for wave in range(60)
        for _ in range(num)
    ]
    assert max(Looks(requests).open_at) <= SETTLED_S


@settings(max_examples=examples(15))
@given(seeds, durations, st.integers(4, 32))
def test_more_clients_are_no_independent_arrivals_for_long(seed, lasts, num):
    begins = [*one_by_one(num, 0.5), *one_by_one(num, 0.5, since_s=30.0)]
    looks = Looks([*closed_loops(Random(seed), DURATIONS[lasts], begins)])
    assert max(looks.open_at) <= 30.0 + SETTLED_S


@settings(max_examples=examples(15))
@given(seeds, durations, st.floats(3.0, 20.0))
def test_clients_that_pause_for_long_are_like_independent_arrivals(seed, lasts, pause_s):
    """Each is served for a second, and reads for some: about four are served at a time."""
    rng = Random(seed)
    begins = [rng.uniform(0.0, pause_s) for _ in range(int(4 * (1 + pause_s)))]
    looks = Looks([*closed_loops(rng, DURATIONS[lasts], begins, pause_s)])
    check_open(looks)


def test_a_pause_of_all_clients_is_no_change():
    rng = Random(0)
    requests = [*closed_loops(rng, DURATIONS["exponential"], one_by_one(8, 0.5))]
    paused = [(at, ends) for at, ends in requests if not 30.0 < at < 40.0 and ends < 60.0]
    looks = Looks(paused)
    assert {at for at in looks.open_at if SETTLED_S < at < 30.0 or at > 40.0 + SETTLED_S} == set()


@settings(max_examples=examples(15))
@given(
    seeds,
    st.sampled_from(["constant", "between 0.5 and 1.5"]),
    st.integers(3, 32),
    st.floats(1.6, 8.0),
    st.sampled_from([15.0, 20.0]),
)
def test_closed_loops_that_come_and_go_stay_closed_loops(seed, lasts, num, times, for_s):
    """Some times as many clients every other 20 s, for so long: the next ones come at once, or not.

    Then requests of both are under way for a while.
    """
    rng, requests = Random(seed), []
    for since_s in (0.0, 20.0, 40.0):
        count = num if since_s != 20.0 else int(times * num)
        begins = one_by_one(count, 0.1, since_s)
        asked = closed_loops(rng, DURATIONS[lasts], begins)
        requests += [(at, ends_at) for at, ends_at in asked if at < since_s + for_s]
    looks = Looks(requests)
    looks.look(UNTIL_S)
    open_at = [at for at in looks.open_at if at > SETTLED_S]
    assert open_at == []


@pytest.mark.parametrize("num", [0, 1, 5])
def test_few_requests_show_nothing(num):
    looks = Looks([(float(at), at + 1.0) for at in range(num)])
    looks.look(UNTIL_S)
    assert looks.closed_at == []
