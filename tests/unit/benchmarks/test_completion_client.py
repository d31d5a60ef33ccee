"""A stream that a server cut is no answer, however it was framed."""

import http.client
import io

import pytest

from benchmarks import completion_client
from benchmarks.completion_client import ServerError, stream

EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunked(*parts, is_ended):
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"transfer-encoding: chunked\r\n\r\n" + chunks + (b"0\r\n\r\n" if is_ended else b"")


class Connection:
    """Answers with these bytes, and ends."""

    answer = b""

    def __init__(self, *_, **__):
        self.request = lambda *_: None
        self.is_closed = False

    def getresponse(self):
        response = http.client.HTTPResponse(self)
        response.begin()
        return response

    def makefile(self, _):
        head = b"HTTP/1.1 200 OK\r\nx-request-id: r\r\n"
        return io.BufferedReader(io.BytesIO(head + self.answer))

    def close(self):
        self.is_closed = True


@pytest.fixture
def answer(monkeypatch):
    monkeypatch.setattr(completion_client.http.client, "HTTPConnection", Connection)
    return lambda data: monkeypatch.setattr(Connection, "answer", data)


def test_a_whole_stream_is_an_answer(answer):
    answer(chunked(EVENT, EVENT, DONE, is_ended=True))
    found = stream("http://h:1", {})
    assert (len(found.arrivals_s), found.text, found.request_id) == (2, "aa", "r")


@pytest.mark.parametrize(
    "data",
    [
        chunked(EVENT, is_ended=True),
        chunked(EVENT, is_ended=False),
        chunked(EVENT, DONE, is_ended=False)[:-20],
        b"connection: close\r\n\r\n" + EVENT,
        b"connection: close\r\n\r\n",
    ],
    ids=["without its end", "between chunks", "in a chunk", "until closed", "empty"],
)
def test_a_stream_that_breaks_off_is_an_error(answer, data):
    answer(data)
    with pytest.raises(ServerError, match="http://h:1"):
        stream("http://h:1", {})
