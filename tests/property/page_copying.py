"""What every `PageCopier` must do, as numpy loops say it.

`python -m tests.property.page_copying` checks the Triton kernel: with TRITON_INTERPRET=1 in
Triton's interpreter, without it on a GPU.
"""

import sys

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engines.gpu.page_copier import IndexedCopier, KernelCopier, LaunchShape
from tests.examples import examples

PAGE_BYTES = st.one_of(
    st.integers(1, 200), st.integers(1, 40).map(lambda n: 16 * n), st.integers(32_700, 32_800)
)


@st.composite
def pages(draw, page_bytes):
    """Random rows with gaps between them, somewhere in a tensor: the tensor, and the view."""
    num_pages = draw(st.integers(1, 12))
    gap, lead = draw(st.sampled_from([0, 1, 2, 4, 8, 16, 48])), draw(st.sampled_from([0, 1, 8, 16]))
    stride = page_bytes + gap
    if draw(st.booleans()):
        stride = -(-stride // 16) * 16
    seed = draw(st.integers(0, 2**32 - 1))
    memory = np.random.default_rng(seed).integers(0, 256, lead + num_pages * stride, np.uint8)
    return memory, (lead, num_pages, page_bytes, stride)


@st.composite
def cases(draw):
    page_bytes = draw(PAGE_BYTES)
    source, target = draw(pages(page_bytes)), draw(pages(page_bytes))
    num_sources, num_targets = source[1][1], target[1][1]
    targets = draw(st.lists(st.integers(0, num_targets - 1), unique=True))
    sources = draw(
        st.lists(st.integers(0, num_sources - 1), min_size=len(targets), max_size=len(targets))
    )
    return source, target, np.array(sources, np.int64), np.array(targets, np.int64)


def place(case, device):
    memory, (lead, num_pages, page_bytes, stride) = case
    # 16-byte alignment of what numpy or torch allocates is not promised: take it.
    whole = torch.zeros(len(memory) + 16, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % 16
    whole[start : start + len(memory)] = torch.tensor(memory, device=device)
    rows = whole.as_strided((num_pages, page_bytes), (stride, 1), start + lead)
    return whole, rows, start


def expect(memory, shape):
    lead, num_pages, page_bytes, stride = shape
    return np.lib.stride_tricks.as_strided(memory[lead:], (num_pages, page_bytes), (stride, 1))


def check_case(copier, case, device="cpu"):
    """`gather` and `scatter` of one case, and that no other byte changes."""
    source, target, source_index, target_index = case
    _, source_rows, _ = place(source, device)
    given_source = expect(source[0], source[1])

    staging = torch.zeros(len(source_index) + 1, source[1][2], dtype=torch.uint8, device=device)
    copier.gather(source_rows, source_index, staging)
    for number, at in enumerate(source_index):
        assert (staging[number].cpu().numpy() == given_source[at]).all()
    assert not staging[-1].any()

    expected = target[0].copy()
    for at, to in zip(source_index, target_index, strict=True):
        expect(expected, target[1])[to] = given_source[at]
    whole, target_rows, start = place(target, device)
    copier.scatter(staging, target_index, target_rows)
    assert (whole[start : start + len(expected)].cpu().numpy() == expected).all()


@settings(max_examples=examples(75), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def check_indexed(case):
    check_case(IndexedCopier(), case)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(cases(), st.sampled_from([LaunchShape(), LaunchShape(3, 512, 4)]))
def check_kernels(case, shape):
    check_case(KernelCopier(shape), case, sys.argv[1])


if __name__ == "__main__":
    check_kernels()
    print("moved")
