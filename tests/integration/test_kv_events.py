"""vLLM's real publisher, followed: lost messages, replays, overruns, restarts, who binds."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import select
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import zmq

from baton.engines.vllm.access_middleware import DrainState
from baton.engines.vllm.event_relay import relay_events
from baton.events.blocks import (
    AllBlocksCleared,
    BlockStored,
    Lost,
    Restarted,
    WorkerBlockIndex,
)
from baton.events.journal import BATON_HASHES
from baton.events.journal_page import make_page
from baton.events.wire import decode_page
from baton.ids import WorkerId
from tests.free_ports import find_free_port
from tests.integration.following_kv_events import WAIT_S, Consumer, Life, wait_until
from tests.preloaded import VLLM, PreloadedProcess

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

START_S = 120.0
GOLDEN = Path(__file__).parents[1] / "vectors" / "events" / "vllm-0.32.json"


def stored(*hashes):
    return ["stored", hashes]


def removed(*hashes):
    return ["removed", hashes]


def chain(start, stop):
    """A batch for each block, so that each loss shows in the holdings."""
    return [[stored(block)] for block in range(start, stop)]


@pytest.fixture(scope="module")
def nursery():
    """The socket where lives of a publisher are born."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "nursery", Path(folder) / "log"
        program = "tests.integration.kv_event_publisher"
        with log.open("wb") as output:
            process = PreloadedProcess(VLLM, program, [str(path)], os.environ, output)
        try:
            listens, _, _ = select.select([process.stdout], [], [], START_S)
            assert listens, log.read_text()
            assert process.stdout.readline() == b"listening\n", log.read_text()
            yield str(path)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            process.stdout.close()


@pytest.fixture
def ends(tmp_path):
    return f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"


@pytest.fixture
def closing():
    """Closes what a test has opened, last first."""
    opened = []
    yield lambda thing: opened.append(thing) or thing
    for thing in reversed(opened):
        thing.close()


@pytest.fixture
def give_birth(nursery, closing):
    return lambda *args, **options: closing(Life(nursery, *args, **options))


def test_events_arrive_once_and_in_order(ends, give_birth, closing):
    life = give_birth(*ends)
    consumer = closing(Consumer(*ends).connect())
    life.publish([stored(1, 2, 3), removed(2)], [stored(4)])
    consumer.follow(life)
    assert consumer.block_index.num_blocks["GPU", 0] == 3
    life.publish([["cleared", []]], [stored(7)])
    consumer.follow(life)
    assert [type(e) for e in consumer.events].count(BlockStored) == 3
    assert consumer.count(AllBlocksCleared) == 1
    assert consumer.health.num_lost == consumer.health.num_restarts == 0
    assert 0 <= consumer.health.lag_s < 5


def test_a_late_subscriber_learns_the_whole_history(ends, give_birth, closing):
    life = give_birth(*ends)
    life.publish(*chain(0, 3_000), [removed(7)])
    consumer = closing(Consumer(*ends).connect())
    consumer.follow(life)
    assert consumer.count(BlockStored) == 3_000
    assert consumer.health.num_lost == 0


def capture(life: Life, endpoint: str, batches) -> list[list[str]]:
    """The frames that a subscriber receives, as hex, without the time of publication."""
    with zmq.Context.instance().socket(zmq.SUB) as sub:
        sub.linger = 0
        sub.subscribe(b"")
        sub.connect(endpoint)
        time.sleep(0.5)
        life.publish(*batches)
        messages = []
        for _ in batches:
            assert sub.poll(30_000)
            topic, seq, payload = sub.recv_multipart()
            assert payload[1] == 0xCB, "the first element is a float64"
            messages.append([topic.hex(), seq.hex(), (payload[:2] + bytes(8) + payload[10:]).hex()])
        return messages


def test_golden_messages_are_what_this_vllm_sends(ends, give_birth):
    golden = json.loads(GOLDEN.read_text())
    life = give_birth(*ends, topic="kv@pod-1")
    assert capture(life, ends[0], golden["batches"]) == golden["messages"]


class Relay:
    """Stands between publisher and subscriber, and swallows what it is told to: a real loss."""

    def __init__(self, publisher_end: str, own_end: str) -> None:
        context = zmq.Context.instance()
        self._sub, self._pub = context.socket(zmq.SUB), context.socket(zmq.XPUB)
        self._sub.subscribe(b"")
        self._sub.connect(publisher_end)
        self._pub.bind(own_end)
        self.swallowed, self.passed = [], []

    def wait_for_subscribers(self) -> None:
        """Until the subscriber's subscription is here; nothing tells that of the relay itself."""
        assert self._pub.poll(30_000), "nobody has subscribed"
        self._pub.recv()
        time.sleep(0.3)

    def move(self, num: int, lose=lambda seq: False, copies: int = 1) -> None:
        """Carry the next `num` messages on, but for those to lose."""
        for _ in range(num):
            assert self._sub.poll(20_000), "nothing to carry"
            frames = self._sub.recv_multipart()
            seq = int.from_bytes(frames[1], "big")
            (self.swallowed if lose(seq) else self.passed).append(seq)
            if not lose(seq):
                for _ in range(copies):
                    self._pub.send_multipart(frames)

    def close(self) -> None:
        self._sub.close(linger=0)
        self._pub.close(linger=0)


@pytest.fixture
def relayed(ends, tmp_path, give_birth, closing):
    """A life, a relay and a consumer that has heard of the first message."""
    life = give_birth(*ends)
    relay = closing(Relay(ends[0], f"ipc://{tmp_path}/relay"))
    consumer = closing(Consumer(f"ipc://{tmp_path}/relay", ends[1]).connect())
    relay.wait_for_subscribers()
    life.publish([stored(0)])
    relay.move(1)
    consumer.follow(life)
    return life, relay, consumer


def test_lost_messages_are_replayed(relayed):
    life, relay, consumer = relayed
    replays = consumer.health.num_replays
    life.publish(*chain(1, 10), [removed(3)], [stored(99)])
    relay.move(11, lose=lambda seq: 4 <= seq < 11)
    assert relay.swallowed == [4, 5, 6, 7, 8, 9, 10]
    consumer.follow(life)
    assert consumer.health.num_gaps == 1
    assert consumer.health.num_replays == replays + 1
    assert consumer.health.num_lost == 0
    assert consumer.count(BlockStored) == 11


def test_a_lost_last_message_is_found_by_an_audit(relayed):
    life, relay, consumer = relayed
    life.publish(*chain(1, 4))
    relay.move(3, lose=lambda seq: seq == 3)
    consumer.follow(life)  # nothing further is published
    assert consumer.health.num_gaps == 0
    assert relay.swallowed == [3]


def test_copies_are_dropped(relayed):
    life, relay, consumer = relayed
    life.publish(*chain(1, 6))
    relay.move(5, copies=3)
    consumer.follow(life)
    wait_until(lambda: consumer.health.num_duplicates == 10)
    assert consumer.count(BlockStored) == 6
    assert consumer.health.num_restarts == 0


def test_what_is_out_of_the_buffer_is_lost_and_the_rest_is_right(tmp_path, give_birth, closing):
    ends = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    life = give_birth(*ends, buffer_steps=5)
    relay = closing(Relay(ends[0], f"ipc://{tmp_path}/relay"))
    consumer = closing(Consumer(f"ipc://{tmp_path}/relay", ends[1]).connect())
    relay.wait_for_subscribers()
    life.publish([stored(1000)])
    relay.move(1)
    consumer.follow(life)
    life.publish(*chain(0, 20), [removed(16)])
    relay.move(21, lose=lambda seq: seq < 21)  # the last one passes
    wait_until(lambda: consumer.take() == {17, 18, 19}, lambda: consumer.health)
    assert consumer.count(Lost) == consumer.health.num_lost == 1
    life.publish([stored(50)])
    relay.move(1)
    wait_until(lambda: consumer.take() == {17, 18, 19, 50})
    assert consumer.health.num_lost == 1


@pytest.mark.parametrize("num_old", [3, 12])
def test_a_killed_publisher_is_noticed_whatever_its_next_life_counts(
    ends, give_birth, closing, nursery, num_old
):
    old = Life(nursery, *ends)
    consumer = closing(Consumer(*ends).connect())
    old.publish(*chain(0, num_old))
    consumer.follow(old)
    old.kill()
    new = give_birth(*ends)
    new.publish(*chain(100, 108))  # its numbers go beyond 3, and do not reach 12
    consumer.follow(new)
    assert consumer.count(Restarted) == consumer.health.num_restarts == 1


def test_a_next_life_whose_numbers_go_on_seamlessly_is_not_taken_for_the_old(
    ends, closing, nursery, give_birth
):
    old = Life(nursery, *ends)
    consumer = closing(Consumer(*ends).connect())
    old.publish(*chain(0, 4))
    consumer.follow(old)
    old.kill()
    wait_until(lambda: not consumer.health.connected)
    new = give_birth(*ends)
    new.publish(*chain(100, 104))  # perhaps unheard: the subscriber is not back yet
    wait_until(lambda: consumer.health.connected)
    new.publish(*chain(104, 106))  # numbers 4 and 5: just what was expected of the old life
    consumer.follow(new)
    assert consumer.count(Restarted) == 1


def test_messages_published_while_the_subscriber_was_away_are_made_up_for(
    ends, give_birth, closing
):
    life = give_birth(*ends)
    first = Consumer(*ends).connect()
    life.publish(*chain(0, 5))
    first.follow(life)
    first.close()
    assert not first.health.connected
    life.publish(*chain(5, 500), [removed(3)])
    assert first.subscriber.poll() == []
    second = closing(Consumer(*ends).connect())
    second.follow(life)
    assert second.count(BlockStored) == 500


def test_a_consumer_that_does_not_poll_bounds_the_queue_and_loses_nothing(
    ends, give_birth, closing
):
    life = give_birth(*ends)
    consumer = closing(Consumer(*ends, queued=10).connect())
    life.publish(*chain(0, 3_000))
    time.sleep(0.5)
    assert len(consumer.subscriber._queue._items) < 10 + 2 * 256
    consumer.follow(life)
    assert consumer.count(BlockStored) == 3_000
    assert consumer.health.num_lost == 0


def test_a_server_passes_on_what_it_has_stored_over_two_lives(ends, give_birth, nursery):
    """What a gateway of another host reads over HTTP, from vLLM's publisher in the end."""

    async def scenario() -> None:
        drain_state, block_index, last = DrainState(), WorkerBlockIndex(BATON_HASHES), 0

        async def until_known(life: Life) -> None:
            nonlocal last
            async with asyncio.timeout(WAIT_S):
                while block_index._held.get(("GPU", 0), set()) != life.truth:
                    page = decode_page(await make_page(drain_state.journal, last), BATON_HASHES)
                    if page.is_whole:
                        block_index.clear()
                        restarts.append(page.is_incomplete)
                    for event in page.events:
                        block_index.apply(event)
                    last = page.last

        restarts: list[bool] = []
        async with relay_events(ends, WorkerId("v"), drain_state):  # as where vLLM still loads
            old = Life(nursery, *ends)
            await asyncio.to_thread(old.publish, *chain(0, 500), [removed(7)])
            await until_known(old)
            await asyncio.to_thread(old.publish, [["cleared", []]], [stored(5, 6)])
            await until_known(old)
            await asyncio.to_thread(old.kill)
            new = give_birth(*ends)
            await asyncio.to_thread(new.publish, *chain(900, 903))
            await until_known(new)
        assert drain_state.journal is None
        assert len(restarts) >= 2
        assert not any(restarts), "nothing was lost"

    asyncio.run(scenario())
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-events-")]


def test_a_server_passes_on_that_events_were_lost(ends, give_birth):
    """It began to follow when the publisher remembered the latest ones alone."""
    life = give_birth(*ends, buffer_steps=10)
    life.publish(*chain(0, 50))

    async def scenario() -> None:
        drain_state = DrainState()
        async with asyncio.timeout(WAIT_S), relay_events(ends, WorkerId("v"), drain_state):
            page, num_blocks = None, 0
            while num_blocks < 10:
                body = await make_page(drain_state.journal, 1 << 40)
                page = decode_page(body, BATON_HASHES)
                num_blocks = sum(len(event.hashes) for event in page.events)
                await asyncio.sleep(0.02)
            assert page.is_incomplete
            assert {h for event in page.events for h in event.hashes} == set(range(40, 50))

    asyncio.run(scenario())


def test_without_a_replay_endpoint_a_gap_is_a_loss(tmp_path, give_birth, closing):
    end = f"ipc://{tmp_path}/live"
    life = give_birth(end, None)
    relay = closing(Relay(end, f"ipc://{tmp_path}/relay"))
    consumer = closing(Consumer(f"ipc://{tmp_path}/relay", None).connect())
    relay.wait_for_subscribers()
    life.publish(*chain(0, 6))
    relay.move(6, lose=lambda seq: seq == 3)
    wait_until(lambda: consumer.take() == {4, 5}, consumer.take)
    assert consumer.health.num_lost == consumer.count(Lost) == 1


def test_the_subscriber_binds_where_the_publisher_connects(give_birth, closing, nursery):
    live, replay = (f"tcp://127.0.0.1:{find_free_port()}" for _ in range(2))
    consumer = closing(Consumer(live, replay, bind=True).start())
    old = Life(nursery, live, replay)
    old.publish(*chain(0, 5))
    consumer.follow(old)
    old.kill()
    new = give_birth(live, replay)
    new.publish(*chain(100, 103))
    consumer.follow(new)
    assert consumer.count(Restarted) == 1


def test_a_topic_is_taken_whole(ends, give_birth, closing):
    life = give_birth(*ends, topic="kv@pod-10")
    right = closing(Consumer(*ends, topic="kv@pod-10").connect())
    prefix = closing(Consumer(ends[0], None, topic="kv@pod-1").connect())
    time.sleep(0.3)
    life.publish(*chain(0, 3))
    right.follow(life)
    assert prefix.take() == set()


def test_the_subscriber_may_be_first(ends, give_birth, closing):
    consumer = closing(Consumer(*ends).start())
    time.sleep(0.3)
    assert not consumer.health.connected
    life = give_birth(*ends)
    life.publish(*chain(0, 5))
    consumer.follow(life)


def test_stop_is_clean_and_idempotent(ends, give_birth):
    consumer = Consumer(*ends).connect() if give_birth(*ends) else None
    thread = consumer.subscriber._thread
    consumer.close()
    consumer.close()
    assert not thread.is_alive()
