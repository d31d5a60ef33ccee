from __future__ import annotations

import json

import pytest

from baton.auth.ticket import WorkerRef
from baton.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)
from baton.gateway.errors import (
    BodyTooLargeError,
    DeadlineError,
    ErrorAnswer,
    MethodNotAllowedError,
    NoWorkerError,
    PathNotFoundError,
    ShuttingDownError,
    StaleTicketError,
    UpstreamError,
    WorkerFailedError,
    WorkerLostError,
    WorkerUnreachableError,
    answer_for,
)
from baton.ids import Epoch, WorkerId


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("x"), 400, "invalid_request"),
        (ContextLengthError("x", code="context_length_exceeded"), 400, "context_length_exceeded"),
        (ModelNotFoundError("x"), 404, "model_not_found"),
        (PathNotFoundError("x"), 404, "not_found"),
        (MethodNotAllowedError("x", allowed="GET"), 405, "method_not_allowed"),
        (BodyTooLargeError("x"), 413, "request_too_large"),
        (UpstreamError("x"), 502, "worker_failed"),
        (WorkerLostError("x"), 502, "worker_failed"),
        (WorkerUnreachableError("x"), 502, "worker_failed"),
        (StaleTicketError(WorkerRef(WorkerId("w"), Epoch("e"), "a")), 502, "worker_failed"),
        (OverloadedError("x"), 503, "overloaded"),
        (NoWorkerError("x"), 503, "no_worker"),
        (ShuttingDownError("x"), 503, "shutting_down"),
        (DeadlineError("x"), 504, "deadline_exceeded"),
    ],
)
def test_each_error_has_its_status_and_openais_shape(error, status, code):
    answer = answer_for(error)
    detail = json.loads(answer.body)["error"]
    assert answer.status == status
    assert detail.keys() == {"message", "type", "param", "code"}
    assert detail["code"] == code
    assert detail["message"] == str(error)


def test_an_unexpected_error_tells_no_secrets():
    answer = answer_for(RuntimeError("password=hunter2"))
    assert answer.status == 500
    assert b"hunter2" not in answer.body


def test_the_parameter_is_named():
    answer = answer_for(InvalidRequestError("x", param="stream"))
    assert json.loads(answer.body)["error"]["param"] == "stream"


def test_overload_says_when_to_come_back():
    assert answer_for(OverloadedError("x", retry_after_s=0.2)).headers == ((b"retry-after", b"1"),)
    assert answer_for(OverloadedError("x", retry_after_s=2.5)).headers == ((b"retry-after", b"3"),)


def test_a_workers_own_answer_is_kept():
    own = ErrorAnswer(503, b'{"error":{}}', ((b"retry-after", b"9"),))
    assert answer_for(WorkerFailedError("x", answer=own)) is own


def test_as_an_event_it_ends_the_stream():
    event = answer_for(DeadlineError("line one\nline two")).event
    assert event.startswith(b'data: {"error":{')
    assert event.endswith(b"}\n\ndata: [DONE]\n\n")
    assert event.count(b"\n") == 4, "a line feed inside would end the event early"
