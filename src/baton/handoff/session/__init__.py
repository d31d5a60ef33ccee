"""One handoff as two state machines: pure, no I/O, no clock.

    decode: ReceiveSession                                prefill: SendSession

    WAITING ── begin ─────────► Grant ─────────────────►  granted ── OFFERED
       │                                                     │        (a grant may come first)
       │                                                   begin
       │                                                     ▼
    GRANTED ◄── mover prefill: writes + notices ────────  SENDING    layer_ready ⇒ Submit
       │    ◄── mover decode: Available, then reads          │                or Announce
       │  landed: counts, digests were checked               │
       │                                                  finish: all submitted or announced
       │  ◄──────────────────── Finished ────────────────    ▼
       │                                                  DRAINING   writes still complete,
       ▼                                                     │       or Taken is awaited
    LANDED   all counted and Finished: KVLanded              │
       │     mover decode: Taken ─────────────────────────►  ▼
    ENDED                                                 ENDED      KVSent

Whatever ends it early (`fail`, `abort`, `expire`) leaves by one road:

    GRANTED ─► ENDING ── no hand left ──► ENDED           SENDING ─► ENDING ─ no write left ─► ENDED
      KVFailed   │           BlocksQuiescent                             │            SendFailed
      at once    └ pages stay quarantined                                └ source pages stay held

A hand in the decode worker's pages is the peer's (mover prefill: an open window, until
`window_quiescent`) or its own (mover decode: reads, until each has ended). With staged pages the
engine's blocks are apart from them: BlocksQuiescent comes with KVFailed, and ENDING goes on for the
staged pages alone. LANDED is passed at once where no window is open.

Finished is the sender's word that nothing will follow, so pages are settled when the count is full
and Finished is here, whichever comes last. What lands after ENDING finds its window closed. A
sender that fails releases its pages under a reader's eyes: digests tell, and Failed is on its way.

`receiving.py` and `sending.py` of the package above carry out the actions that the methods return.

File map:
    actions.py  what a session asks its desk to do
    terms.py    who moves the bytes, and into which pages
    receive.py  `ReceiveSession`: decode's half
    send.py     `SendSession`: prefill's half
"""
