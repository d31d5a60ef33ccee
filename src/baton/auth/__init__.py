"""Who may do what: the cluster key, and what is signed with it.

Enters: the cluster key (32 bytes or more, from configuration). Leaves: signed tickets, and proofs
that a peer on a socket holds the same key.

File map:
    key.py        `ClusterKey`: derives one sub-key for each purpose, signs, compares
    ticket.py     `Ticket`: what one handoff is authorised to touch; `seal` and `unseal`
    replay.py     `UsedTickets`: no ticket is used twice
    challenge.py  mutual proof of the key on a fresh connection (sans-I/O)
"""
