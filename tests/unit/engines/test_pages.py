"""Pages over a region: canonical bytes, and a mirror that hides nothing from peers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.engines.transformers.attention import Span  # noqa: E402
from baton.engines.transformers.model_runner import PagedModel  # noqa: E402
from baton.engines.transformers.pages import KVPages, MirroredPages, allocate_pages  # noqa: E402
from baton.transfer.region import view_pages  # noqa: E402
from tests.unit.engines.harness import make_model, make_prompt, prepare, tiny_llama  # noqa: E402

CPU = torch.device("cpu")
BLOCKS = np.array([3, 0, 2])


def fill(pages: KVPages, block_size: int) -> torch.Tensor:
    """Compute 10 tokens into `BLOCKS`."""
    loaded = tiny_llama()
    model = PagedModel(loaded.model, loaded.shape, pages, block_size)
    span = Span(make_prompt(10).astype(np.int64), 0, BLOCKS, needs_logits=True)
    return model.run([span], lambda _: None)


def test_a_page_is_plane_token_head_dim() -> None:
    shape = tiny_llama().shape
    pages = allocate_pages(shape, shape.to_layout(4, "float32"), 4, CPU)
    fill(pages, 4)
    keys, values = pages.planes[1]
    page = view_pages(pages.region.memory, pages.region.arrays[1])[0].view(np.float32)
    expected = page.reshape(2, 4, 2, 8)
    np.testing.assert_array_equal(keys[0].numpy(), expected[0])
    np.testing.assert_array_equal(values[0].numpy(), expected[1])
    assert expected.any(axis=(2, 3)).all()


def test_a_latent_page_is_one_plane() -> None:
    shape = prepare(make_model("deepseek_v3")).shape
    pages = allocate_pages(shape, shape.to_layout(4, "float32"), 4, CPU)
    latent, rotary = pages.planes[0]
    latent[1, 2, 0] = 1.0
    rotary[1, 2, 0] = 2.0
    page = view_pages(pages.region.memory, pages.region.arrays[0])[1].view(np.float32)
    np.testing.assert_array_equal(page.reshape(4, 24)[2], [1.0] * 16 + [2.0] * 8)


def test_mirrored_pages_give_the_same_numbers_and_the_same_region() -> None:
    shape = tiny_llama().shape
    layout = shape.to_layout(4, "float32")
    plain = allocate_pages(shape, layout, 4, CPU)
    region = allocate_pages(shape, layout, 4, CPU).region
    mirrored = MirroredPages(shape, layout, region, CPU)  # the CPU plays the accelerator
    assert torch.equal(fill(plain, 4), fill(mirrored, 4))
    assert bytes(region.memory) == bytes(plain.region.memory)


def test_mirrored_pages_take_what_peers_wrote() -> None:
    shape = tiny_llama().shape
    layout = shape.to_layout(4, "float32")
    source = allocate_pages(shape, layout, 4, CPU)
    fill(source, 4)
    region = allocate_pages(shape, layout, 4, CPU).region
    mirrored = MirroredPages(shape, layout, region, CPU)
    region.memory[:] = source.region.memory
    mirrored.load_blocks([3, 0])
    for ours, theirs in zip(mirrored.planes, source.planes, strict=True):
        for plane, written in zip(ours, theirs, strict=True):
            assert torch.equal(plane[[3, 0]], written[[3, 0]])
            assert not plane[2].any()
