"""One handoff as two state machines: pure, no I/O, no clock.

    decode: ReceiveSession                                prefill: SendSession

    WAITING ── begin ─────────► Grant ─────────────────►  granted ── OFFERED
       │                                                     │        (a grant may come first)
       │                                                   begin
       │                                                     ▼
    GRANTED ◄── op WRITE: writes + notifications ────────  SENDING    layer_ready ⇒ Submit
       │    ◄── op READ: Available, then reads          │                or Announce
       │  landed: counts, digests were checked               │
       │                                                  finish: all submitted or announced
       │  ◄──────────────────── Finished ────────────────    ▼
       │                                                  DRAINING   writes still complete,
       ▼                                                     │       TransferAck is awaited
    LANDED   all counted and Finished: KVLanded              │
       │     TransferAck ───────────────────────────────────────►  ▼
    ENDED                                                 ENDED      KVSent

A transport that fails while others work is left, and what it lost is sent again:

    fencing  ◄────────────── TransportFailed(transport) ──── leaving: its writes have all ended
       │ closed: nothing can land                               ▼
       └─ fenced ─────────── RetransmitRequest(ranges) ─────────► resend: missing ranges it carried

Why what was verified stays right. Let W be a write over the failed transport T.

1. TransportFailed is sent only after W has ended at the sender. By the transport's contract the
   sender stores nothing of W from then on; the receiver drops what is in flight.
2. `fenced` follows only when T's write grant is closed and (`Capabilities.late_writes`: the NIC may
   still hold W) T has reported quiescence. So after `fenced` no byte of W is stored.
3. Ranges are sent again only in answer to RetransmitRequest, hence after `fenced`. KVLanded needs a
   full count and no pending fence.
4. A range that T carried is either counted before `fenced`, its digest checked once it was all
   stored, or not at all: T's notifications do not count any more. So bytes under a counted range
   are never stored into again and no range is counted twice; a second notification is a protocol
   error.
5. Only ranges that T carried are sent again: not those that are on their way over another.

With a staged view KV goes through its pages, and a GPU may copy: `layers_ready` asks for it
(GatherPages), `gathered` sends it; on decode's side `scattering` and `scattered` enclose the copy
of what has landed, and KVLanded waits for the last one.

With op READ the peer writes nothing: a read that ended is made again elsewhere. Where nothing
reads any more, and no read is under way, `reverse` makes the op WRITE: a write grant opens,
and what has not landed is written.

With op "NONE" (by reference) nothing is moved:

    GRANTED ── Grant ─────────────────────────────────►  SENDING    layer_ready: nothing is sent
       │  ◄──────────────── BlocksExported, Finished ────────────     │  finish, all ready: Export
       ▼                                                    ▼
    ENDED   the last block copied: KVLanded              ENDED      KVExported: blocks are exported

or, by ExportRefused, it becomes a handoff with op WRITE before it has begun. Exported blocks
outlive both sessions: `reference/` shows what releases them. A receiver
that asked for an export and has not landed has a pending release (`may_hold_export`): its peer may
have exported the blocks before it received the failure.

With encoded pages the prefill worker may answer a grant with EncodingRefused. Once the write grant
is quiescent the receiver is WAITING again, and the next Grant is of the pages that it asks for.

Whatever ends it early (`fail`, `abort`, `expire`) leaves by one road:

    GRANTED ─► ENDING ── quiescent ─────► ENDED           SENDING ─► ENDING ─ no write left ─► ENDED
      KVFailed   │           BlocksQuiescent                             │            SendFailed
      at once    └ pages stay quarantined                                └ source pages stay held

WAITING, nothing was granted: it sends Declined, as the peer may hold its KV already, and ends.

What is in flight into the decode worker's pages is the peer's (op WRITE: an open write grant, until
`grant_quiescent`) or its own (op READ: reads, until each has ended). With staged pages the
engine's blocks are apart from them: BlocksQuiescent comes with KVFailed, or when the last copy into
the blocks has ended, and ENDING goes on for the staged pages alone. LANDED is passed at once where
no write grant is open.

Finished states that the sender submits nothing more (except retransmissions), so pages are complete
when the count is full and Finished was received, whichever comes last. Writes that arrive after
ENDING find their write grant closed. A sender that fails releases its pages while the peer may read
them: digests detect that, and Failed is on its way.

How long prefill waits once all is computed is a lease (lease.py): decode renews it while its
request is queued there, before `begin`, and until it has taken everything. One that runs out is a
failure like any other at the sending side; what decode reads after it, by its own clock, is one
there too.

How long either waits for the other is a deadline (actions.py), which `wait_until` moves while
prefill's engine shows that it lives and has yet to compute the prompt.

In mode pull `begin` is decode's turn to have room: nothing is reserved there before, prefill stands
in OFFERED with all computed, and the first message about the ticket may be a renewal.

`decode_receiver.py` and `prefill_sender.py` of the package above carry out the actions that the
methods return.

File map:
    actions.py  what a session asks its context to do, how long it waits, its transfers and plan
    lease.py    how long prefill holds what decode has not taken: each side's half
    receive.py  `ReceiveSession`: decode's half
    send.py     `SendSession`: prefill's half; `CarriedWrites`: what each transport carries
"""
