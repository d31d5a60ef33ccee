"""The campaign finds what a decoder does wrong, and the same again."""

from __future__ import annotations

import multiprocessing
import random
import time

import msgspec
import pytest

from baton.errors import ProtocolError
from baton.net.framing import decode, encode
from tests.fuzz import campaign
from tests.fuzz.mutation import Tree, mutate
from tests.fuzz.targets import TARGETS, Target

SEED = msgspec.msgpack.encode({"length": 4, "data": b"abcd", "name": "x"})


class Message(msgspec.Struct):
    length: int
    data: bytes
    name: str


_decoder = msgspec.msgpack.Decoder(Message)


def trusting(body: bytes) -> Message:
    """Believes a length before it checks it."""
    message = decode(_decoder, body)
    target = bytearray(min(message.length, 1 << 40) if message.length > 0 else 0)
    if len(target) != len(message.data):
        raise ProtocolError("another length")
    return message


def forgetful(body: bytes) -> Message:
    return _decoder.decode(body)


def changed(body: bytes) -> Message:
    message = decode(_decoder, body)
    message.length += 1
    return message


def slow(body: bytes) -> Message:
    message = decode(_decoder, body)
    if not message.data:
        until = time.thread_time() + 0.15
        while time.thread_time() < until:
            pass
    return message


def right(body: bytes) -> Message:
    return decode(_decoder, body)


def planted(read, encoder=None) -> Target:
    return Target("planted", read, (ProtocolError,), (SEED,), "msgpack", encoder, max_s=0.1)


def run_planted(read, encoder, num_inputs=1500):
    """In a process of its own: its memory is bounded."""
    TARGETS["planted"] = planted(read, encoder)
    return [
        (finding.where, finding.data, finding.what)
        for finding in campaign.run_chunk("planted", 0, num_inputs).findings.values()
    ]


@pytest.fixture(name="process", scope="module")
def process_fixture():
    with multiprocessing.get_context("forkserver").Pool(1) as process:
        yield process


@pytest.mark.parametrize(
    ("read", "encoder", "where"),
    [
        (trusting, encode, "MemoryError, trusting in test_campaign.py"),
        (forgetful, None, "UnicodeDecodeError, forgetful in test_campaign.py"),
        (changed, encode, "AssertionError, check in targets.py"),
        (slow, encode, "slow"),
    ],
)
def test_a_defect_is_found_with_an_input_that_shows_it(read, encoder, where, process):
    ran = process.apply(run_planted, (read, encoder))
    found = {place: data for place, data, _ in ran}
    assert where in found
    if read is not trusting:  # here memory is not bounded
        _, finding = campaign.run_input(planted(read, encoder), found[where])
        assert finding is not None
        assert finding.where == where


def test_a_decoder_without_defects_has_no_findings(process):
    assert process.apply(run_planted, (right, encode)) == []


def test_a_seed_gives_the_same_inputs_again():
    pool = [SEED, b"\x80"]
    trees = [tree for data in pool if (tree := Tree.read("msgpack", data))]

    def draw(seed):
        rng = random.Random(seed)
        return [mutate(rng, "msgpack", pool, trees) for _ in range(500)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(set(draw(1))) > 300


def test_inputs_are_divided_by_weight_and_every_target_has_some():
    chunks = campaign.plan(list(TARGETS), 200_000, 7)
    num_inputs = dict.fromkeys(TARGETS, 0)
    for chunk in chunks:
        num_inputs[chunk.target] += chunk.num_inputs
    assert min(num_inputs.values()) > 0
    assert abs(sum(num_inputs.values()) - 200_000) < len(TARGETS)
    assert num_inputs["handoff-message"] > 3 * num_inputs["ticket"]
    assert len(set(chunks)) == len(chunks)
    assert {chunk.target for chunk in chunks[: len(TARGETS)]} == TARGETS.keys()
