"""What the world is told about blocks: which ones a worker has cached, and which it has dropped.

Enters: a publisher's messages (vLLM's, over ZMQ). Leaves: `BlockStored`, `BlockRemoved` and
`AllBlocksCleared`, each once and in order, or `Lost` and `Restarted`, which say that whatever was
known of that worker is void. Wire format: docs/wire/kv-events.md.

File map:
    blocks.py        the events, the batch they came in, and the feed that gives them out
    wire.py          vLLM's messages: decoded, bounds-checked
    sequence.py      `Sequencer`: gaps, replays, duplicates, restarts (pure)
    block_index.py      `WorkerBlockIndex`: what one worker holds now (pure)
    subscription.py  the live socket, and whether it is connected
    replay.py        one question for what was missed
    event_queue.py        what the subscriber's thread has for its consumer, bounded
    subscriber.py    `KVEventSubscriber`: the thread over all of these
    metrics.py       a feed, counted
"""
