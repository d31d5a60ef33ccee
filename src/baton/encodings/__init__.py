"""Encodings of KV: how its numbers are written in a store's entries and on a link.

    interface.py     KVEncoding: the contract, and its registry (entry points `baton.encodings`)
    error_budget.py  which encodings err by at most so much: for entries, for links
    rates.py         what an encoding takes for a byte
    reference.py     KV to measure encodings with
    planes.py        where each plane of a block is, as it was computed and as it is encoded
    rows.py          int8, fp8: a scale for each token and head
    int4.py          int4: keys by channel, values by token; int4_token: both by token
    exponents.py     zstd: lossless, what compresses is the exponents
    raw.py           raw: the bytes as they are

Pure functions over arrays in canonical order; no thread, no I/O.
"""
