"""The copy stream on the CPU, which does all at once; order is tested in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from baton.engines.gpu.copy_stream import CopyStream  # noqa: E402
from baton.engines.transformers.attention import Span  # noqa: E402
from baton.engines.transformers.model_runner import PagedModel  # noqa: E402
from baton.engines.transformers.pages import MirroredPages, allocate_pages  # noqa: E402
from baton.errors import TransferError  # noqa: E402
from tests.examples import examples  # noqa: E402
from tests.unit.engines.harness import make_prompt, tiny_llama  # noqa: E402

CPU = torch.device("cpu")
NUM_PAGES, PAGE_BYTES = 24, 48
INDICES = st.lists(st.integers(0, NUM_PAGES - 1), unique=True, min_size=1)


def random_pages(seed: int) -> torch.Tensor:
    numbers = np.random.default_rng(seed).integers(0, 256, (NUM_PAGES, PAGE_BYTES), np.uint8)
    return torch.from_numpy(numbers)


@settings(max_examples=examples(40), deadline=None)
@given(pages=INDICES, at=INDICES, staging_bytes=st.sampled_from([1, 100, 1 << 20]))
def test_pages_go_where_they_should(pages: list[int], at: list[int], staging_bytes: int) -> None:
    num_pages = min(len(pages), len(at))
    index, places = np.array(pages[:num_pages]), np.array(at[:num_pages])
    copy_stream, device, host = CopyStream(CPU, staging_bytes), random_pages(1), random_pages(2)
    expected = host.clone()
    expected[places] = device[index]
    assert copy_stream.to_host(device, index, host, places).is_done()
    assert torch.equal(host, expected)
    back = random_pages(3)
    expected = back.clone()
    expected[index] = host[places]
    copy_stream.to_device(host, places, back, index).wait()
    assert torch.equal(back, expected)


def test_neighbours_on_both_sides_need_no_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_stream = CopyStream(CPU)
    monkeypatch.setattr(copy_stream, "_copier", None)
    host = random_pages(2)
    copy_stream.to_host(random_pages(1), np.array([3, 4, 9]), host, np.array([5, 6, 1]))
    assert torch.equal(host[[5, 6, 1]], random_pages(1)[[3, 4, 9]])


def test_room_that_was_made_during_inference_serves_later_too() -> None:
    copy_stream, device, host = CopyStream(CPU), random_pages(1), random_pages(2)
    scattered, neighbours = np.array([7, 3, 5]), np.array([1, 2, 3])
    with torch.inference_mode():
        copy_stream.to_host(device, scattered, host, neighbours)
    assert torch.equal(host[1:4], device[[7, 3, 5]])
    copy_stream.to_device(host, neighbours, device, scattered[::-1].copy())
    assert torch.equal(device[[5, 3, 7]], host[1:4])


def test_pages_that_are_not_there_are_refused() -> None:
    copy_stream, host = CopyStream(CPU), random_pages(2)
    for index, at in (([24], [0]), ([0], [24]), ([0, 1], [0])):
        with pytest.raises(TransferError):
            copy_stream.to_host(random_pages(1), np.array(index), host, np.array(at))
    assert torch.equal(host, random_pages(2))


class Slow:
    """A crossing that takes until it is told to be over."""

    def __init__(self) -> None:
        self.is_over = False

    def is_done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True


def test_layers_are_shown_in_order_once_they_have_crossed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tiny_llama().shape
    layout = shape.to_layout(4, "float32")
    mirrored = MirroredPages(shape, layout, allocate_pages(shape, layout, 4, CPU).region, CPU)
    events = [Slow(), Slow(), Slow()]
    begun = iter(events)
    monkeypatch.setattr(mirrored._copy_stream, "to_host", lambda *_: next(begun))
    for layer in (0, 1, 0):
        mirrored.publish_layer(layer, np.array([0]))
    assert not list(mirrored.poll_published())
    events[1].is_over = True
    assert not list(mirrored.poll_published())  # layer 0 comes first
    events[0].is_over = True
    assert list(mirrored.poll_published()) == [0, 1]
    assert list(mirrored.wait_published()) == [0]
    assert events[2].is_over
    assert not list(mirrored.wait_published())


def test_a_pass_tells_of_layers_that_cross_slowly_when_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = tiny_llama()
    layout = loaded.shape.to_layout(4, "float32")
    region = allocate_pages(loaded.shape, layout, 4, CPU).region
    mirrored = MirroredPages(loaded.shape, layout, region, CPU)
    events: list[Slow] = []
    told: list[tuple[int, int]] = []

    def begin(*_: object) -> Slow:
        events.append(Slow())
        return events[-1]

    monkeypatch.setattr(mirrored._copy_stream, "to_host", begin)
    model = PagedModel(loaded.model, loaded.shape, mirrored, 4)
    span = Span(make_prompt(10).astype(np.int64), 0, np.array([3, 0, 2]), needs_logits=True)
    model.run([span], lambda layer: told.append((layer, sum(each.is_over for each in events))))
    assert told == [(0, 1), (1, 2)]  # each after its own crossing, not after all of them
