"""Workloads: conversations of requests, by number of tokens. Pure and seeded.

Enters: lengths, or a trace file. Leaves: `Conversation`s, whose prompts are named, not yet written:
`synthetic.py` writes one as token ids or as words. The same name and seed is the same prompt on any
machine, so that all servers of a comparison receive the same requests.

File map:
    requests.py     Segment, Request, Conversation, Workload
    synthetic.py    fixed lengths, shared prefixes, conversations of several turns; prompts
    traces.py       recorded traffic: Mooncake, Azure, OpenAI batches
"""
