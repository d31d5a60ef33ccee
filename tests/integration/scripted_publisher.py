"""A publisher of KV events in vLLM 0.32's wire form, without vLLM: docs/wire/kv-events.md.

Each is one life: it counts from 0, and remembers what it has sent. What the bytes of a message are
is the test's business; `stored` makes some, and those of `tests/vectors/events` are vLLM's own.
"""

from __future__ import annotations

import threading
import time

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def stored(*hashes: int) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1] * 16 * len(hashes),
        "block_size": 16,
        "medium": "GPU",
        "group_idx": 0,
    }


class ScriptedPublisher:
    """`endpoint` and `replay_endpoint` are what vLLM's configuration would say."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str = "") -> None:
        self.source = {"endpoint": endpoint, "replay_endpoint": replay_endpoint, "topic": topic}
        self._topic = topic.encode()
        self._sent: list[bytes] = []
        context = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        if "*" in endpoint or endpoint.startswith("ipc://"):
            self._bind(self._pub, endpoint)
        else:
            self._pub.connect(endpoint)
        if replay_endpoint is not None:
            self._bind(self._router, replay_endpoint)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="publisher")
        self._thread.start()

    def publish(self, *events: dict[str, object], is_lost: bool = False) -> None:
        """One message of these events; a lost one is only had on request."""
        self.publish_bytes(msgspec.msgpack.encode([time.time(), events, 0]), is_lost=is_lost)

    def publish_bytes(self, payload: bytes, *, is_lost: bool = False) -> None:
        self._sent.append(payload)
        if not is_lost:
            self._pub.send_multipart(self._frames(len(self._sent) - 1))

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._pub.close(linger=0)
        self._router.close(linger=0)

    def _frames(self, seq: int) -> list[bytes]:
        return [self._topic, seq.to_bytes(8, "big"), self._sent[seq]]

    def _answer(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(10):
                continue
            who, empty, start = self._router.recv_multipart()
            for seq in range(int.from_bytes(start, "big"), len(self._sent)):
                self._router.send_multipart([who, empty, *self._frames(seq)])
            self._router.send_multipart([who, empty, b"", END, b""])

    def _bind(self, sock: zmq.Socket[bytes], endpoint: str) -> None:
        """Bind; the life before may only just be over."""
        for _ in range(100):
            try:
                sock.bind(endpoint)
            except zmq.ZMQError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError(f"{endpoint} stays taken")
