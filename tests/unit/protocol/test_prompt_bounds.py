from __future__ import annotations

import pytest

from baton.errors import InvalidRequestError
from baton.protocol.prompt_bounds import MAX_MESSAGES, check_messages

TOO_MANY = MAX_MESSAGES + 1


@pytest.mark.parametrize(
    "key", [rb"role", rb"\u0072ole", rb"r\u006fle", rb"\u0072\u006F\u006C\u0065"]
)
def test_messages_are_counted_however_their_keys_are_escaped(key: bytes) -> None:
    message = b'{"' + key + b'":"user","content":""}'
    check_messages(b"[" + b",".join([message] * MAX_MESSAGES) + b"]")
    with pytest.raises(InvalidRequestError, match="more than 4096") as caught:
        check_messages(b"[" + b",".join([message] * TOO_MANY) + b"]")
    assert caught.value.code == "too_many_messages"


def test_what_a_text_quotes_is_no_message() -> None:
    text = rb"{\"role\": \"user\", \"\\u0072ole\": \"user\"}" * TOO_MANY
    check_messages(b'[{"r\\u006fle":"user","content":"' + text + b'"}]')
