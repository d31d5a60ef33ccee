"""vLLM's own publisher, each of its lives in a process of its own.

vLLM takes seconds to import: this program has it loaded (`tests.preloaded`), and forks a life for
each connection to the Unix socket that its argument names. A life reads JSON lines: first the
publisher's arguments, answered with its pid, then lists of batches, each answered when the last one
is sent. At the end of input it shuts down.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)


def live(stream) -> None:
    publisher = ZmqEventPublisher(0, **json.loads(stream.readline()))
    reply(stream, os.getpid())
    for line in stream:
        for events in json.loads(line):
            publisher.publish(make_batch(events))
        while publisher._event_queue.unfinished_tasks:
            time.sleep(0.001)
        reply(stream, "sent")
    publisher.shutdown()


def make_batch(events):
    return KVEventBatch(ts=time.time(), events=[make_event(*event) for event in events])


def make_event(kind: str, hashes: list[int]):
    if kind == "cleared":
        return AllBlocksCleared()
    if kind == "removed":
        return BlockRemoved(block_hashes=hashes, medium="GPU", group_idx=0)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[1] * 16 * len(hashes),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * len(hashes),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def reply(stream, value) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def main() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                with connection, connection.makefile("rw") as stream:
                    live(stream)
                os._exit(0)
            connection.close()
            reap()


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
