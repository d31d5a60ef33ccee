"""Records for tests."""

from baton.bench.load.records import Record
from baton.bench.load.stream import Failure, Tokens


def whole(sent_s=0.0, token_s=(1.0, 1.5, 2.0), num_output=3, num_prompt=10, **fields):
    return Record(
        index=0,
        conversation=0,
        sent_s=sent_s,
        token_s=tuple(sent_s + each for each in token_s),
        ended_s=sent_s + token_s[-1],
        tokens=Tokens(num_prompt, num_output, 0),
        finish_reason="length",
        **fields,
    )


def failed(kind="refused", sent_s=0.0, ended_s=0.1, message="no"):
    failure = Failure(kind, message)
    return Record(index=0, conversation=0, sent_s=sent_s, ended_s=ended_s, failure=failure)


def cut(sent_s=0.0, token_s=(1.0,), ended_s=5.0):
    return Record(
        index=0, conversation=0, sent_s=sent_s, token_s=token_s, ended_s=ended_s, is_cut=True
    )
