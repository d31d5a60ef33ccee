"""KV events: which blocks a worker has cached, and which it has evicted.

Enters: a publisher's messages (vLLM's, over ZMQ), or what the embedded engine's cache does. Leaves:
`BlockStored`, `BlockRemoved`, `BlocksExpected` and others, each once and in order, or `Lost` and
`Restarted`, which invalidate whatever was known of that worker. Wire: docs/wire/kv-events.md.

File map:
    blocks.py      the events, the batch they came in, and the feed that delivers them;
                   `WorkerBlockIndex`: what one worker holds now (pure)
    wire.py        vLLM's messages, and pages of a journal: decoded, bounds-checked
    journal.py     `CacheJournal`: the latest events of a Baton worker's cache and store, for
                   who asks; journal_page.py answers them
    sequence.py    `Sequencer`: gaps, replays, duplicates, restarts (pure)
    endpoint.py    where a publisher is
    subscriber.py  `KVEventSubscriber`: its thread and its bounded queue; the live socket, replay
                   requests
    metrics.py     a feed, counted
"""
