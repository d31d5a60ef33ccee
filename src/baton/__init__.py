"""Baton hands the KV cache from prefill to decode.

A newcomer follows one block through the packages in the order of `docs/journey.md`: computed
(`engines`), named (`kv`), handed over (`handoff`), moved (`transfer`), asked for (`gateway`).

File map:
    ids.py       identities: one type for each
    errors.py    every exception that is raised on purpose
    record.py    records that one process makes for each handoff, transfer or message
    registry.py  where implementations are found: entry points
    clock.py     time: the one module that reads the machine's clocks
"""

__version__ = "0.1.0"
