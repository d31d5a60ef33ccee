"""What is asked of a server: conversations of requests, by number of tokens. Pure and seeded.

Enters: lengths, or a trace file. Leaves: `Conversation`s, whose prompts are named, not yet written:
`prompts.py` writes one as token ids or as words. The same name and seed is the same prompt, on any
machine, so that every server that is compared is asked the same.

File map:
    asking.py       the words: Segment, Ask, Conversation, Workload
    lengths.py      fixed lengths: prefill-heavy, balanced, decode-heavy
    reuse.py        what prompts share: shared prefixes, conversations of several turns
    prompts.py      segments → token ids or words
    choosing.py     a name on a command line → a workload
    traces/         recorded traffic: Mooncake, Azure, OpenAI batches
"""
