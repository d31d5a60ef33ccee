from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.ticket import hash_tenant
from baton.errors import ProtocolError
from baton.events.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDomain,
    pack_ids,
)
from baton.events.wire import (
    END_OF_REPLAY,
    MAX_MESSAGE_BYTES,
    decode_message,
    decode_replayed,
    encode_replay_request,
    is_end_of_replay,
)

DOMAIN = EventDomain("vllm/sha256")
GOLDEN = Path(__file__).parents[2] / "vectors" / "events" / "vllm-0.32.json"
SEQ = (7).to_bytes(8, "big")
STORED = {
    "type": "BlockStored",
    "block_hashes": [5, b"h" * 32],
    "parent_block_hash": 4,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "medium": "CPU",
    "group_idx": 3,
}

IDS = pack_ids((1, 2, 3, 4))


def message(*events, at=1.5, rank=0):
    return [b"topic", SEQ, msgspec.msgpack.encode([at, list(events), rank])]


def test_golden_messages_of_vllm_decode():
    golden = json.loads(GOLDEN.read_text())
    frames = [[bytes.fromhex(frame) for frame in message] for message in golden["messages"]]
    numbered = [decode_message(each, DOMAIN) for each in frames]
    assert [each.seq for each in numbered] == [0, 1, 2]
    assert [each.batch.events for each in numbered] == [
        (BlockStored(DOMAIN, (1, 2**64 - 1), None, pack_ids((1,) * 32), 16, "GPU", 0),),
        (
            BlockRemoved(DOMAIN, (1,), "GPU", 0),
            BlockStored(DOMAIN, (0x0123456789ABCDEF,), None, pack_ids((1,) * 16), 16, "GPU", 0),
        ),
        (AllBlocksCleared(),),
    ]
    assert len({each.digest for each in numbered}) == 3


def test_all_fields_are_read():
    read = decode_message(message(STORED, rank=2), DOMAIN)
    assert read.seq == 7
    assert read.batch.events == (BlockStored(DOMAIN, (5, b"h" * 32), 4, IDS, 2, "CPU", 3),)
    assert (read.batch.published_at, read.batch.data_parallel_rank) == (1.5, 2)


def test_ids_may_be_packed_as_those_of_batons_own_workers_are():
    packed = decode_message(message(STORED | {"token_ids": IDS}), DOMAIN)
    assert packed.batch.events == decode_message(message(STORED), DOMAIN).batch.events


def test_absent_medium_and_group_are_the_engines_own_pool():
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": None}
    [event] = decode_message(message(removed), DOMAIN).batch.events
    assert event == BlockRemoved(DOMAIN, (1,), "GPU", 0)


def test_a_block_whose_tokens_are_not_known_is_a_block():
    placeholder = STORED | {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    [event] = decode_message(message(placeholder), DOMAIN).batch.events
    assert (event.packed_ids, event.block_size) == (b"", 0)


@pytest.mark.parametrize(
    ("lora_name", "extra_keys", "salt"),
    [
        (None, None, ""),
        (None, [["salt"], None], hash_tenant("salt")),
        ("sql", [["sql"], ["sql"]], "/sql"),
        ("sql", [["sql", "salt"], ["sql"]], f"{hash_tenant('salt')}/sql"),
    ],
)
def test_what_goes_into_a_hash_besides_tokens(lora_name, extra_keys, salt):
    event = with_extra_keys(None, lora_name, extra_keys)
    assert (event.num_plain, event.salt) == (None, salt)


IMAGE = ["an image's hash", 3]


@pytest.mark.parametrize(
    ("lora_name", "extra_keys", "num_plain", "salt"),
    [
        (None, [None, [IMAGE]], 1, ""),
        (None, [["salt"], [IMAGE]], 1, hash_tenant("salt")),
        (None, [[IMAGE], None], 0, ""),
        (None, [None, ["salt"]], 1, ""),
        (None, [None, [1]], 1, ""),
        (None, 5, 0, ""),
        ("sql", None, 0, "/sql"),
        ("sql", [["law"], ["sql"]], 0, "/sql"),
        ("sql", [["sql"], None], 1, "/sql"),
        ("sql", [["sql", "salt", "more"], ["sql"]], 0, "/sql"),
        ("sql", [["sql"], ["sql", "more"]], 1, "/sql"),
        ("sql", [["sql", IMAGE], ["sql"]], 0, "/sql"),
        ("sql", [["sql"], ["sql", IMAGE]], 1, "/sql"),
    ],
)
def test_blocks_before_an_image_depend_on_tokens_alone(lora_name, extra_keys, num_plain, salt):
    event = with_extra_keys(None, lora_name, extra_keys)
    assert (event.num_plain, event.salt) == (num_plain, salt)


def with_extra_keys(parent, lora_name, extra_keys):
    changed = {"parent_block_hash": parent, "lora_name": lora_name, "extra_keys": extra_keys}
    [event] = decode_message(message(STORED | changed), DOMAIN).batch.events
    return event


def test_blocks_that_follow_others_have_their_adapters_name_too():
    event = with_extra_keys(7, "sql", [["sql"], ["sql"]])
    assert (event.num_plain, event.salt) == (None, "")
    assert with_extra_keys(7, None, [["salt"], None]).num_plain == 0


def test_unknown_fields_are_ignored_and_unknown_events_counted():
    batch = decode_message(
        message(STORED | {"colour": {"a": [1]}}, {"type": "BlockPainted"}, {"type": "Other"}),
        DOMAIN,
    ).batch
    assert len(batch.events) == 1
    assert batch.num_unknown == 2


def test_lives_differ_in_their_digests():
    first, second = (decode_message(message(STORED, at=at), DOMAIN) for at in (1.0, 2.0))
    assert (first.seq, first.batch.events) == (second.seq, second.batch.events)
    assert first.digest != second.digest


@pytest.mark.parametrize(
    "change",
    [
        {"block_hashes": [b""]},
        {"block_hashes": [b"h" * 65]},
        {"block_hashes": ["text"]},
        {"block_hashes": None},
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"token_ids": bytes(7)},
        {"token_ids": pack_ids([5, -1])},
        {"block_size": -1},
        {"block_size": 2**20},
        {"medium": ""},
        {"medium": "m" * 65},
        {"group_idx": -1},
        {"parent_block_hash": "text"},
    ],
)
def test_an_event_out_of_bounds_spoils_its_message(change):
    with pytest.raises(ProtocolError):
        decode_message(message(STORED | change), DOMAIN)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"", SEQ],
        [b"", SEQ, b"", b""],
        [b"", SEQ[1:], message()[2]],
        [b"", b"\xff" * 8, message()[2]],
        [b"", SEQ, b"\xc1"],
        [b"", SEQ, msgspec.msgpack.encode([1.0])],
        [b"", SEQ, msgspec.msgpack.encode([-1.0, []])],
        [b"", SEQ, msgspec.msgpack.encode([1.0, [{"no": "type"}]])],
        [b"", SEQ, msgspec.msgpack.encode([1.0, ["BlockStored"]])],
        [b"", SEQ, message()[2] + bytes(MAX_MESSAGE_BYTES)],
    ],
)
def test_what_is_no_message_is_refused(frames):
    with pytest.raises(ProtocolError):
        decode_message(frames, DOMAIN)


@given(st.lists(st.binary(max_size=40), max_size=4), st.binary(max_size=200))
def test_noise_raises_nothing_else(frames, payload):
    for each in (frames, [b"", SEQ, payload], [b"", b"", SEQ, payload]):
        for decode in (decode_message, decode_replayed):
            with contextlib.suppress(ProtocolError):
                decode(each, DOMAIN)


def test_questions_and_answers():
    assert encode_replay_request(258) == [b"", b"\0\0\0\0\0\0\1\2"]
    assert is_end_of_replay([b"", b"", END_OF_REPLAY, b""])
    assert not is_end_of_replay([b"", *message()])
    assert decode_replayed([b"", *message(STORED)], DOMAIN) == decode_message(
        message(STORED), DOMAIN
    )
    with pytest.raises(ProtocolError):
        decode_replayed(message(STORED), DOMAIN)
