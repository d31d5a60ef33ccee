"""One handoff as two state machines: pure, no I/O, no clock.

    decode: ReceiveSession                                prefill: SendSession

    WAITING ── link_up ───────► Grant ─────────────────►  granted ── OFFERED
       │                                                     │        (a grant may come first)
       │                                                  attached
       │                                                     ▼
    GRANTED ◄────────────── writes + notices ───────────  SENDING    layer_ready ⇒ Submit
       │  landed: counts, digests were checked               │
       │                                                  finish: all submitted
       │  ◄──────────────────── Finished ────────────────    ▼
       ▼                                                  DRAINING   writes still complete
    LANDED   all counted and Finished: KVLanded              ▼
                                                          ENDED      KVSent

Whatever ends it early (`fail`, `abort`, `expire`) leaves by one road:

    GRANTED ─► ENDING ─ window_quiescent ─► ENDED         SENDING ─► ENDING ─ no write left ─► ENDED
      KVFailed   │           BlocksQuiescent                             │            SendFailed
      at once    └ pages stay quarantined                                └ source pages stay held

Finished is the writer's word that nothing will follow, so pages are settled when the count is full
and Finished is here, whichever comes last. What lands after ENDING finds its window closed.

`receiving.py` and `sending.py` of the package above carry out the actions that the methods return.

File map:
    actions.py  what a session asks its desk to do
    receive.py  `ReceiveSession`: decode's half
    send.py     `SendSession`: prefill's half
"""
