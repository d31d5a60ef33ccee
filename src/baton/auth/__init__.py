"""Who may do what: the cluster key, and what is signed with it.

Enters: the cluster key (32 bytes or more) and identities, from configuration. Leaves: signed
tickets, and proofs of who the peer on a connection is.

File map:
    key.py        `ClusterKey`: derives one sub-key for each purpose, signs, compares
    certificates.py  authorities, identities with roles, who is trusted
    credentials.py   `Credentials`: this process's identity and trust, as their files change
    issuing.py    directories of authorities and identities: made, renewed and shown
    sealed.py     `SealedMessage`: bytes with the signature and the certificate of their author
    ticket.py     `Ticket`: what one handoff is authorised to touch; `seal` and `unseal`
    verified_tickets.py  `VerifiedTickets`: a text that was verified is not verified again
    replay.py     `UsedTickets`: no ticket is used twice
    challenge.py  mutual proof of the key on a fresh connection (sans-I/O)
    session.py    the sealed frames that follow it
"""
