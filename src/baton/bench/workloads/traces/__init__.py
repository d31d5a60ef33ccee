"""Recorded traffic as a workload. Broken lines are counted and named, not hidden.

File map:
    lines.py      lines → requests, and what was wrong with the others
    mooncake.py   JSONL: timestamp, input_length, output_length, hash_ids
    azure.py      CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    batches.py    JSONL of whole requests, as OpenAI's batch API takes them
    reading.py    a file → a workload
"""
