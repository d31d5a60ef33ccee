"""Each level finds what it promises, with the probability that it promises."""

import msgspec
import numpy as np
import pytest

from baton.config.sections import HandoffSection
from baton.handoff.incoming import DigestVerifier, Sampler
from baton.handoff.verify import VerificationPolicy, path_of
from baton.handoff.write_batches import WriteBatchBuilder
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.digest import DigestKey
from baton.kv.layout import KVLayout
from baton.transfer.interface import Capabilities
from baton.transfer.region import allocate_host_region, view_pages

NUM_BLOCKS = 64
KEY = DigestKey(b"k" * 32, b"handoff")
LAYOUT = KVLayout.gqa(2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


@pytest.fixture
def received():
    """Random blocks, their inspector, and what their sender said of layer 0."""
    layout = LAYOUT
    page_bytes = [layout.page_bytes(layer) for layer in range(layout.num_layers)]
    region = allocate_host_region([(NUM_BLOCKS, size) for size in page_bytes])
    layer_pages = [view_pages(region.memory, array) for array in region.arrays]
    pages = layer_pages[0]
    pages[:] = np.random.default_rng(7).integers(0, 256, pages.shape, np.uint8)
    sequence = sequence_of_all()
    packer = WriteBatchBuilder(layer_pages, sequence, sequence, key=KEY)
    (parcel,) = packer.build(range(1), 0, NUM_BLOCKS * layout.block_size)
    return (
        pages,
        DigestVerifier(layer_pages, sequence, layout, KEY),
        packer.digest(parcel, is_keyed=True),
        parcel,
    )


def sequence_of_all():
    return PagedSequence(LAYOUT, BlockTable(0, np.arange(NUM_BLOCKS, dtype=np.int64)))


def sampler(share, seed=1):
    return Sampler(share, np.random.default_rng(seed))


def test_full_finds_any_bit(received):
    pages, inspector, notification, _ = received
    assert inspector.verify(notification, is_keyed=True).wrong_layers == []
    assert (
        inspector.verify(notification, is_keyed=True).num_tokens == NUM_BLOCKS * LAYOUT.block_size
    )
    for page in (0, 17, NUM_BLOCKS - 1):
        pages[page, 5] ^= 1
        assert inspector.verify(notification, is_keyed=True).wrong_layers == [0]
        pages[page, 5] ^= 1


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_sampled_finds_a_spoilt_piece_with_its_stated_probability(received, share):
    """One of 64 pieces is wrong; the one of each layer that is sure to be seen helps a little."""
    pages, inspector, notification, _ = received
    pages[33, 0] ^= 1
    num_rounds = 1500
    num_found = sum(
        len(inspector.verify(notification, sampler(share, seed), is_keyed=True).wrong_layers)
        for seed in range(num_rounds)
    )
    expected = 1 - (1 - share) * (1 - 1 / NUM_BLOCKS)
    deviation = (expected * (1 - expected) / num_rounds) ** 0.5
    assert num_found / num_rounds == pytest.approx(expected, abs=5 * deviation)


def test_sampled_finds_sooner_what_is_wrong_in_many_pieces(received):
    pages, inspector, notification, _ = received
    pages[:32, 0] ^= 1
    num_found = sum(
        len(inspector.verify(notification, sampler(0.125, seed), is_keyed=True).wrong_layers)
        for seed in range(300)
    )
    assert num_found / 300 > 1 - (1 - 0.125) ** 32 - 0.05


def test_of_every_layer_one_piece_is_looked_at():
    chooser = sampler(1e-9)
    for layer in range(5):
        assert len(chooser.choose(layer, 10)) == 1
        assert len(chooser.choose(layer, 10)) == 0, "its layer was looked at"
    assert len(sampler(1.0).choose(0, 10)) == 10


def test_the_choice_cannot_be_foreseen():
    choices = {tuple(Sampler(0.5).choose(0, 64)) for _ in range(20)}
    assert len(choices) == 20


def test_sampled_wants_a_digest_of_every_piece(received):
    """Else a sender could leave out what it spoilt."""
    _, inspector, notification, _ = received
    for digests in (notification.digests[:-16], b""):
        short = msgspec.structs.replace(notification, digests=digests)
        for level in (None, sampler(0.125)):
            assert inspector.verify(short, level, is_keyed=True).wrong_layers == [0]


def test_who_lacks_the_key_cannot_give_other_bytes_their_digests(received):
    """Neither the digest without a key nor one under another link's or handoff's is taken."""
    pages, inspector, _, parcel = received
    both = [pages] * LAYOUT.num_layers, *[sequence_of_all()] * 2
    for secret, handoff in ((b"o" * 32, b"handoff"), (b"k" * 32, b"other")):
        packer = WriteBatchBuilder(*both, key=DigestKey(secret, handoff))
        forged = packer.digest(parcel, is_keyed=True)
        assert inspector.verify(forged, is_keyed=True).wrong_layers == [0]
    plain = packer.digest(parcel, is_keyed=False)
    assert inspector.verify(plain, is_keyed=False).wrong_layers == []
    assert inspector.verify(plain, is_keyed=True).wrong_layers == [0]


def test_paths():
    memory = ("host",)
    assert path_of(Capabilities(memory, same_host_only=False)) == "network"
    assert path_of(Capabilities(memory, same_host_only=True)) == "same_host"
    inside = Capabilities(memory, same_host_only=True, same_process_only=True)
    assert path_of(inside) == "same_process"


def test_by_default_everything_is_verified():
    assert VerificationPolicy.of(HandoffSection()) == VerificationPolicy()
    paths = ("same_process", "same_host", "network")
    assert {VerificationPolicy().level_on(path) for path in paths} == {"full"}
