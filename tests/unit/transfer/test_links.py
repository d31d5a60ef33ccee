from __future__ import annotations

import numpy as np
import pytest

from baton.clock import Instant
from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.interface import Capabilities, PageArray
from baton.transfer.links.choice import MAX_BACKOFF_S, MIN_BACKOFF_S, Backoff, Chooser
from baton.transfer.links.cost_model import (
    NETWORK,
    SAME_HOST,
    LinkModel,
    Sample,
    TransferShape,
    default_link_model,
    fit,
    measure_shape,
)
from baton.transfer.links.probes import (
    NUM_PATTERN_PAGES,
    PLAN,
    RECOVERY,
    Probe,
    ProbeBounds,
    ProbeBuffer,
    ProbeSeries,
    compute_probe_digest,
    make_probe_copies,
)
from baton.transfer.region import release_region, view_pages

FAST_START = LinkModel(10e-6, 1e-6, 1 / 1e9)
FAST_RUN = LinkModel(500e-6, 1e-6, 1 / 10e9)
SMALL, LARGE = TransferShape(4096, 1), TransferShape(1 << 24, 1)
MIDDLE, SCATTERED = TransferShape(1 << 18, 1), TransferShape(1 << 18, 64)
FULL = TransferShape(1 << 22, 1)


def group(src: list[int], dst: list[int], spans: list[tuple[int, int, int]]) -> CopyGroup:
    return CopyGroup(np.array(src), np.array(dst), np.array(spans, dtype=np.int64))


@pytest.mark.parametrize(
    ("copies", "num_descriptors"),
    [
        (group([1, 2, 3], [5, 6, 7], [(0, 0, 64)]), 1),
        (group([1, 2, 3], [7, 6, 5], [(0, 0, 64)]), 3),
        (group([1, 2, 4], [5, 6, 7], [(0, 0, 64)]), 2),
        (group([1, 2, 3], [5, 6, 7], [(0, 0, 32)]), 3),
        (group([1, 2], [5, 6], [(0, 0, 16), (32, 32, 16)]), 4),
        (group([], [], [(0, 0, 64)]), 0),
    ],
)
def test_adjacent_whole_pages_are_one_descriptor(copies: CopyGroup, num_descriptors: int) -> None:
    arrays = (PageArray(0, 64, 8),)
    shape = measure_shape(PageCopies(0, (copies,)), arrays, arrays)
    assert shape == TransferShape(copies.num_bytes, num_descriptors)


def test_the_cheapest_is_chosen_by_size() -> None:
    models = {"a": FAST_RUN, "b": FAST_START}
    chooser = Chooser("measured")
    assert chooser.choose(SMALL, models, ["a", "b"]).used == "b"
    choice = chooser.choose(LARGE, models, ["a", "b"])
    assert (choice.expected, choice.used) == ("a", "a")
    assert [p.transport for p in choice.predictions] == ["a", "b"]
    assert choice.predicted_s == FAST_RUN.predict(LARGE)


def test_by_the_list_the_first_that_works_is_used() -> None:
    models = {"a": FAST_RUN, "b": FAST_START}
    assert Chooser("listed").choose(SMALL, models, ["a", "b"]).used == "a"
    choice = Chooser("listed").choose(SMALL, models, ["b"])
    assert (choice.expected, choice.used, choice.is_mismatch) == ("a", "b", True)


def test_nothing_usable_is_no_choice() -> None:
    assert Chooser("measured").choose(SMALL, {"a": FAST_RUN}, []) is None


def test_what_is_better_and_does_not_work_is_expected() -> None:
    models = {"a": FAST_RUN, "b": FAST_START}
    choice = Chooser("measured").choose(LARGE, models, ["b"])
    assert (choice.expected, choice.used) == ("a", "b")


def test_noise_does_not_flip_a_choice_and_a_real_change_does() -> None:
    chooser = Chooser("measured")
    steady = LinkModel(100e-6, 1e-9, 1e-12)
    used = []
    for factor in (0.97, 1.04, 0.98, 1.03, 0.96):
        other = LinkModel(100e-6 * factor, 1e-9, 1e-12)
        used.append(chooser.choose(SMALL, {"a": steady, "b": other}, ["a", "b"]).used)
    assert set(used) == {"b"}, "b was cheaper at first; never by enough to be left, or returned to"
    slow = LinkModel(200e-6, 1e-9, 1e-12)
    assert chooser.choose(SMALL, {"a": steady, "b": slow}, ["a", "b"]).used == "a"


def test_equal_guesses_leave_the_choice_to_the_order() -> None:
    network = Capabilities(memory=("host",), same_host_only=False)
    here = Capabilities(memory=("shared",), same_host_only=True)
    models = {"x": default_link_model(network), "y": default_link_model(network)}
    assert Chooser("measured").choose(LARGE, models, ["x", "y"]).used == "x"
    models["z"] = default_link_model(here)
    assert Chooser("measured").choose(LARGE, models, ["x", "y", "z"]).used == "z"
    assert not default_link_model(here).is_measured


def test_cooling_doubles_to_a_limit_and_ends_with_a_success() -> None:
    backoff = Backoff()
    assert [backoff.record_failure(Instant(0.0)) for _ in range(3)] == [
        MIN_BACKOFF_S,
        2 * MIN_BACKOFF_S,
        4 * MIN_BACKOFF_S,
    ]
    assert not backoff.is_over(Instant(1.9))
    assert backoff.is_over(Instant(2.0))
    assert [backoff.record_failure(Instant(0.0)) for _ in range(20)][-1] == MAX_BACKOFF_S
    backoff.record_success()
    assert backoff.record_failure(Instant(0.0)) == MIN_BACKOFF_S


def test_a_slow_link_is_not_given_the_large_probes() -> None:
    series = ProbeSeries(
        ProbeBounds(0.1, 1 << 25), default_link_model(Capabilities(("host",), False))
    )
    made = []
    while (probe := series.next()) is not None:
        made.append(probe.shape.num_bytes)
        series.made(1e-3 + probe.shape.num_bytes / 10e6)  # 10 MB/s
    assert set(made) == {1 << 12, 1 << 18}
    assert series.model.bandwidth == pytest.approx(10e6, rel=0.3)


def test_a_series_stays_within_its_bytes() -> None:
    series = ProbeSeries(ProbeBounds(1.0, 600_000), FAST_RUN)
    while series.next() is not None:
        series.made(1e-4)
    assert sum(sample.shape.num_bytes for sample in series.samples) <= 600_000


def test_an_undisturbed_link_is_given_every_probe_in_as_few_rounds_as_may_be() -> None:
    series = ProbeSeries(ProbeBounds(), FAST_RUN)
    while (probe := series.next()) is not None:
        assert series.next() is probe, "it is the same until it was made"
        series.made(FAST_START.predict(probe.shape))
    assert len(series.samples) == PLAN.least_rounds * len(PLAN.probes)
    assert series.model.predict(LARGE) == pytest.approx(FAST_START.predict(LARGE), rel=0.01)


def test_a_disturbed_link_is_asked_until_two_of_each_kind_agree() -> None:
    """Bursts of 4 to 21 ms over three rounds; all that is known of the link comes after them."""
    series, num_made = ProbeSeries(ProbeBounds(), FAST_RUN), 0
    while (probe := series.next()) is not None:
        waits_s = (num_made * 7 % 18 + 4) * 1e-3 if num_made < 3 * len(PLAN.probes) else 0.0
        series.made(FAST_START.predict(probe.shape) + waits_s)
        num_made += 1
    assert num_made == 5 * len(PLAN.probes)
    assert series.model.predict(LARGE) == pytest.approx(FAST_START.predict(LARGE), rel=0.01)


def test_a_link_that_never_agrees_with_itself_is_left_after_the_last_round() -> None:
    series, num_made = ProbeSeries(ProbeBounds(1e9, 1 << 40), FAST_RUN), 0
    while series.next() is not None:
        num_made += 1
        series.made(100.0 / 1.3**num_made)
    assert num_made == PLAN.most_rounds * len(PLAN.probes)


def test_what_a_library_takes_to_connect_is_not_what_the_link_costs() -> None:
    """The first probe takes longer than all of them may."""
    series = ProbeSeries(ProbeBounds(0.1, 1 << 27), FAST_RUN)
    while (probe := series.next()) is not None:
        series.made(FAST_START.predict(probe.shape) if series.samples else 0.3)
    assert {sample.shape for sample in series.samples} == {probe.shape for probe in PLAN.probes}
    for shape in (SMALL, LARGE):
        assert series.model.predict(shape) == pytest.approx(FAST_START.predict(shape), rel=0.01)


def test_one_that_failed_is_tried_once_with_each_probe() -> None:
    series = ProbeSeries(ProbeBounds(), FAST_RUN, RECOVERY)
    while series.next() is not None:
        series.made(1e-3 / (1 + len(series.samples)))
    assert len(series.samples) == len(RECOVERY.probes)


def test_a_busy_machine_does_not_turn_the_order_of_two_links_round() -> None:
    """As it was seen: few probes of the slower link, all of them small and disturbed."""
    quick = [(SMALL, 250e-6), (MIDDLE, 597e-6), (SCATTERED, 649e-6), (FULL, 5.6e-3)]
    slow = [(SMALL, 8.5e-3), (SMALL, 10.2e-3), (MIDDLE, 1.4e-3), (MIDDLE, 25e-3)]
    shared, tcp = (
        fit([Sample(*each) for each in seen], prior)
        for seen, prior in ((quick, SAME_HOST), (slow, NETWORK))
    )
    for num_bytes in (1 << 12, 1 << 18, 1 << 24, 1 << 28):
        shape = TransferShape(num_bytes, 1)
        assert shared.predict(shape) < tcp.predict(shape)


@pytest.mark.parametrize("probe", dict.fromkeys((*PLAN.probes, *RECOVERY.probes)))
def test_a_probe_is_known_by_its_digest_and_only_once(probe: Probe) -> None:
    probe_buffer = ProbeBuffer.allocate()
    try:
        pages = view_pages(probe_buffer.region.memory, probe_buffer.region.arrays[0])
        (copied,) = make_probe_copies(probe).groups
        copied_bytes = slice(0, probe.page_bytes)
        pages[copied.dst_pages, copied_bytes] = pages[copied.src_pages, copied_bytes]
        assert probe_buffer.try_take(probe.num_pages, compute_probe_digest(probe))
        assert not probe_buffer.try_take(probe.num_pages, compute_probe_digest(probe)), (
            "it was wiped"
        )
        pages[copied.dst_pages, copied_bytes] = pages[copied.src_pages, copied_bytes]
        pages[NUM_PATTERN_PAGES, 7] ^= 1
        assert not probe_buffer.try_take(probe.num_pages, compute_probe_digest(probe))
        assert not probe_buffer.try_take(NUM_PATTERN_PAGES + 1, compute_probe_digest(probe))
        num_descriptors = measure_shape(
            make_probe_copies(probe), probe_buffer.region.arrays, probe_buffer.region.arrays
        ).num_descriptors
        assert num_descriptors == probe.shape.num_descriptors
    finally:
        del pages
        release_region(probe_buffer.region)


def test_what_leaves_the_host_must_be_much_faster_than_what_does_not() -> None:
    models = {"near": LinkModel(1e-5, 1e-9, 1e-10, 9), "far": LinkModel(6e-6, 1e-9, 1e-10, 9)}
    assert Chooser("measured").choose(SMALL, models, ["near", "far"]).used == "far"
    chooser = Chooser("measured", frozenset({"near"}))
    assert chooser.choose(SMALL, models, ["near", "far"]).used == "near"
    assert chooser.choose(SMALL, models, ["far"]).used == "far"
    models["far"] = LinkModel(3e-6, 1e-9, 1e-11, 9)
    assert chooser.choose(SMALL, models, ["near", "far"]).used == "far"
