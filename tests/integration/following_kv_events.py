"""Both ends of a stream of KV events: a life of vLLM's publisher, and a consumer."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

from baton.clock import MachineClock
from baton.events.blocks import EventDomain, WorkerBlockIndex
from baton.events.endpoint import LiveEndpoint, ReplayEndpoint
from baton.events.subscriber import KVEventSubscriber, SubscriberOptions
from baton.ids import WorkerId

DOMAIN = EventDomain("vllm/sha256")
WAIT_S = 20.0


class Life:
    """One life of a publisher. `truth` is what follows from all that it has published."""

    def __init__(self, nursery: str, endpoint: str, replay_endpoint: str | None, **options):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(nursery)
        self._stream = self._socket.makefile("rw")
        self.pid = self._ask({"endpoint": endpoint, "replay_endpoint": replay_endpoint} | options)
        self.truth: set[int] = set()
        self.num_published = 0

    def publish(self, *batches) -> None:
        """Returns when all are sent, to whoever is connected."""
        for events in batches:
            for kind, hashes in events:
                match kind:
                    case "stored":
                        self.truth |= set(hashes)
                    case "removed":
                        self.truth -= set(hashes)
                    case "cleared":
                        self.truth.clear()
        assert self._ask(batches) == "sent"
        self.num_published += len(batches)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let it shut down, and wait for that."""
        self._socket.shutdown(socket.SHUT_WR)
        self._stream.read()
        self._stream.close()
        self._socket.close()

    def _ask(self, value):
        self._stream.write(json.dumps(value) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())


class Consumer:
    """A subscriber, and the holdings that it feeds."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic="", bind=False, queued=10_000
    ):
        replay = None if replay_endpoint is None else ReplayEndpoint(replay_endpoint)
        live = LiveEndpoint(endpoint, topic=topic, bind=bind)
        options = SubscriberOptions(WorkerId("vllm-0"), DOMAIN, live, replay, queued)
        self.subscriber = KVEventSubscriber(options, MachineClock())
        self.block_index = WorkerBlockIndex(DOMAIN)
        self.events = []

    @property
    def health(self):
        return self.subscriber.health

    def start(self):
        self.subscriber.start()
        return self

    def connect(self):
        self.start()
        wait_until(lambda: self.health.connected and self.health.state == "in_sync")
        return self

    def take(self) -> set[int]:
        for event in self.subscriber.poll():
            self.events.append(event)
            self.block_index.apply(event)
        self.block_index.check_invariants()
        return self.block_index._held.get(("GPU", 0), set())

    def follow(self, life: Life) -> None:
        """Wait until this consumer has taken up all that was published, and knows the truth."""
        wait_until(lambda: self.is_level(life), lambda: f"{self.health} {self.take()} {life.truth}")

    def is_level(self, life: Life) -> bool:
        held = self.take()
        health = self.health
        return (
            health.last_seq == life.num_published - 1
            and health.state == "in_sync"
            and held == life.truth
        )

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def close(self) -> None:
        self.subscriber.stop()


def wait_until(condition, describe=lambda: "") -> None:
    deadline, pause_s = time.monotonic() + WAIT_S, 0.005
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {describe()}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)  # to look goes through all that is held
