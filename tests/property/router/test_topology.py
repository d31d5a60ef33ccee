"""Distances: the highest level that differs decides, and tables agree with the pure function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.router.topology import MOST_PLACES, Distance, Places


def compute_distance(one: str, other: str) -> Distance:
    """What `Places` is to find, pair by pair."""
    pairs = list(
        zip(*((*path.split("/", 3), "", "", "")[:4] for path in (one, other)), strict=True)
    )
    zone, rack, host, device = (all(pair) and pair[0] != pair[1] for pair in pairs)
    _, has_rack, has_host, has_device = map(all, pairs)
    near = Distance.SAME_RACK if has_rack else Distance.SAME_ZONE
    if zone:
        return Distance.CROSS_ZONE
    if rack:
        return Distance.SAME_ZONE
    if host:
        return near
    if device:
        return Distance.SAME_HOST
    if has_device:
        return Distance.SAME_DEVICE
    return Distance.SAME_HOST if has_host else near


names = st.sampled_from(["", "a", "b"])
paths = st.lists(names, max_size=4).map("/".join)
whole = st.lists(st.sampled_from("ab"), min_size=4, max_size=4).map("/".join)


def test_each_level_has_its_distance():
    here = "z1/r1/h1/d1"
    distances = {
        "z1/r1/h1/d1": Distance.SAME_DEVICE,
        "z1/r1/h1/d2": Distance.SAME_HOST,
        "z1/r1/h1": Distance.SAME_HOST,
        "z1/r1/h2/d1": Distance.SAME_RACK,
        "z1/r2/h1/d1": Distance.SAME_ZONE,
        "z2/r1/h1/d1": Distance.CROSS_ZONE,
        "//h2": Distance.SAME_ZONE,
        "//h1": Distance.SAME_HOST,
        "z2//h1": Distance.CROSS_ZONE,
        "": Distance.SAME_ZONE,
    }
    for there, distance in distances.items():
        assert compute_distance(here, there) is distance, there
    assert [str(each) for each in Distance] == [
        "same_device", "same_host", "same_rack", "same_zone", "cross_zone",
    ]  # fmt: skip


@given(paths, paths)
def test_it_is_the_same_both_ways(one, other):
    assert compute_distance(one, other) is compute_distance(other, one)


@given(whole, whole, whole)
def test_of_three_places_the_two_farthest_are_equally_far(one, other, third):
    near, far, farthest = sorted([
        compute_distance(one, other),
        compute_distance(other, third),
        compute_distance(one, third),
    ])
    assert near <= far
    assert far == farthest


@given(
    st.lists(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=4).map("/".join), max_size=60)
)
def test_the_table_agrees_with_the_function(listed):
    places = Places()
    for one in listed:
        for other in listed:
            assert places.distance(one, other) is compute_distance(one, other)


def test_a_fleet_without_end_is_bounded():
    places = Places()
    for n in range(MOST_PLACES + 5):
        places.number(f"z/r/h{n}")
    assert len(places.distances) == MOST_PLACES
    assert places.distance("z/r/h0", f"z/r/h{MOST_PLACES + 4}") is Distance.SAME_ZONE
    assert places.distance("z/r/h0", "z/r/h1") is Distance.SAME_RACK
