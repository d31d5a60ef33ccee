"""Baton hands the KV cache from prefill to decode.

A newcomer follows one block through the packages in the order of `docs/journey.md`: computed
(`engines`), named (`kv`), handed over (`handoff`), moved (`transfer`), asked for (`gateway`).
"""

__version__ = "0.1.0"
