from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from baton.engines.interface import FinishReason
from baton.worker.replies import ReplyHead
from baton.worker.streaming import CHAT_EVENTS, COMPLETION_EVENTS, EventWriter

TEXT = st.text(max_size=20)


def decode(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event.removeprefix(b"data: "))


@given(TEXT, TEXT, TEXT, st.sampled_from([None, *FinishReason]), st.booleans())
def test_events_are_json_on_one_line_whatever_they_say(
    text: str, model: str, request_id: str, finish: FinishReason | None, usage: bool
) -> None:
    head = ReplyHead(request_id, model, 7)
    for shape in (COMPLETION_EVENTS, CHAT_EVENTS):
        writer = EventWriter(shape, head, include_usage=usage)
        event = decode(writer.text(text, None, finish))
        choice = {"index": 0, "logprobs": None, "finish_reason": finish}
        content = {"text": text} if shape is COMPLETION_EVENTS else {"delta": {"content": text}}
        assert event == {
            "id": shape.id_prefix + request_id,
            "object": shape.object,
            "created": 7,
            "model": model,
            "choices": [choice | content],
        } | ({"usage": None} if usage else {})


def test_only_chats_have_an_opening() -> None:
    head = ReplyHead("r", "demo", 7)
    assert EventWriter(COMPLETION_EVENTS, head, include_usage=False).opening() == b""
    opening = decode(EventWriter(CHAT_EVENTS, head, include_usage=False).opening())
    assert opening["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
