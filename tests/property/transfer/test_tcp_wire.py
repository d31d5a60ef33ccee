"""A small write leaves in one batch: the very bytes that its only stripe would be."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import new_region_handle, new_ticket_id
from baton.kv.copies import CopyGroup, PageCopies
from baton.net.framing import encode_frame
from baton.transfer.interface import PageWrite, RemoteId
from baton.transfer.region import allocate_host_region
from baton.transfer.transports.tcp.wire import cut_stripes, outgoing_batches, whole_write

NUM_PAGES, PAGE_BYTES, STRIPE_BYTES = 80, 8192, 1 << 20
REGION = allocate_host_region([(NUM_PAGES, PAGE_BYTES)])
REGION.memory[:] = np.random.default_rng(0).integers(0, 256, len(REGION.memory), np.uint8).tobytes()

pages = st.lists(st.integers(0, NUM_PAGES - 1), max_size=70)
spans = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 5000)),
    min_size=1,
    max_size=2,
)


@given(pages, spans, st.binary(max_size=20), st.integers(1, 2))
def test_one_batch_is_the_only_stripe(pages, spans, notification, num_groups):
    group = CopyGroup(np.array(pages, np.int64), np.array(pages[::-1], np.int64), np.array(spans))
    write = PageWrite(
        RemoteId(1), new_ticket_id(), new_region_handle(), PageCopies(0, (group,) * num_groups),
        notification,
    )  # fmt: skip
    whole = whole_write(write, REGION, 7)
    if whole is None:
        lengths = [length for _, _, length in spans]
        assert num_groups == 2 or not pages or len(pages) * len(spans) > 64 or min(lengths) < 8192
        return
    (stripe,) = cut_stripes(write, 7, max_stripes=1, stripe_bytes=STRIPE_BYTES)
    batches = outgoing_batches(write, REGION, stripe, encode_frame)
    assert b"".join((encode_frame(whole[0]), *whole[1])) == b"".join(
        buffer for each in batches for buffer in each
    )
