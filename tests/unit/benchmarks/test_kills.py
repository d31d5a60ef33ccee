"""What counts as a client's error while workers are killed."""

import asyncio

import pytest

from benchmarks.bench_kills import Answer, Load, Request, ask

STREAM, WHOLE = (Request("/v1/completions", {"stream": is_stream}) for is_stream in (True, False))


class Session:
    """A server that does not answer."""

    def __init__(self, error):
        self._error = error

    def post(self, *_, **__):
        return self

    async def __aenter__(self):
        raise self._error

    async def __aexit__(self, *_):
        pass


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError()], ids=repr)
def test_a_request_without_an_answer_is_an_error_and_does_not_end_the_run(error):
    load = Load(None, "http://h:1", [STREAM])
    answer = asyncio.run(ask(Session(error), "http://h:1", STREAM))
    load._count(STREAM, answer, Answer(["a"]))
    assert (load.counts.client_errors, load.counts.requests) == (1, 1)


def test_answers_in_one_piece_have_no_gap_that_could_lower_that_of_streams():
    load = Load(None, "http://h:1", [STREAM, WHOLE])
    for request, gap_s in ((STREAM, 0.5), (WHOLE, 0.0)):
        answer = Answer(["a"], status=200, is_done=True, longest_gap_s=gap_s)
        load._count(request, answer, Answer(["a"]))
    assert load.gaps_s == [0.5]
