"""A stream's events → the answer as a client puts it together; a client that reads one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp


@dataclass
class StreamedAnswer:
    """One choice's. `ids` are all ids that its events had, `errors` what came as an error's event.

    `tokens` and `logprobs` are those of either API, in the order in which they came.
    """

    text: str = ""
    reasoning: str = ""
    roles: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    usages: list[dict[str, Any]] = field(default_factory=list)
    ids: set[tuple[str, int]] = field(default_factory=set)
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_events: int = 0
    is_done: bool = False

    @property
    def is_broken(self) -> bool:
        return bool(self.errors) or not self.is_done

    def read_all(self, text: bytes) -> StreamedAnswer:
        """A whole stream: nothing but events, each of which is whole."""
        assert not text or text.endswith(b"\n\n"), text[-200:]
        for event in text.split(b"\n\n")[:-1]:
            self.read(event)
        return self

    def read(self, event: bytes) -> None:
        assert event.startswith(b"data: "), event
        assert not self.is_done, f"after [DONE]: {event!r}"
        self.num_events += 1
        data = event.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        fields = json.loads(data)
        if "error" in fields:
            self.errors.append(fields["error"])
            return
        self.ids.add((fields.get("id"), fields.get("created")))
        if not fields["choices"]:
            self.usages.append(fields["usage"])
        for choice in fields["choices"]:
            self._read_choice(choice)

    def _read_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta", {})
        self.text += choice.get("text") or delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        if "role" in delta:
            self.roles.append(delta["role"])
        if choice.get("finish_reason") is not None:
            self.finishes.append(choice["finish_reason"])
        self._read_logprobs(choice.get("logprobs") or {})
        for call in delta.get("tool_calls") or []:
            known = self.calls.setdefault(call["index"], {"name": "", "arguments": "", "ids": ""})
            known["ids"] += "." if "id" in call else ""
            for name, part in call.get("function", {}).items():
                known[name] += part

    def _read_logprobs(self, logprobs: dict[str, Any]) -> None:
        for entry in logprobs.get("content") or []:
            self.tokens.append(entry["token"])
            self.logprobs.append(entry["logprob"])
        self.tokens += logprobs.get("tokens", [])
        self.logprobs += logprobs.get("token_logprobs", [])
        self.offsets += logprobs.get("text_offset", [])


@dataclass
class StreamClient:
    """A stream that is read as it comes."""

    path: str
    body: dict[str, Any]
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)

    async def ask(self, session: aiohttp.ClientSession, url: str) -> StreamedAnswer:
        async for event in _ask(session, url + self.path, self.body):
            self.answer.read(event)
        return self.answer


@dataclass
class SeveralClient:
    """The same of a completion with `n` > 1: its choices, each as if it had come alone."""

    body: dict[str, Any]
    answers: dict[int, StreamedAnswer] = field(default_factory=dict)

    async def ask(self, session: aiohttp.ClientSession, url: str) -> dict[int, StreamedAnswer]:
        async for event in _ask(session, url + "/v1/completions", self.body):
            if event == b"data: [DONE]":
                for answer in self.answers.values():
                    answer.is_done = True
                continue
            fields = json.loads(event.removeprefix(b"data: "))
            assert "error" not in fields, fields
            self.answers.setdefault(fields["choices"][0]["index"], StreamedAnswer()).read(event)
        return self.answers


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[bytes]:
    """The events of a stream, each of which is whole."""
    async with session.post(url, json={"model": "demo", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        rest = b""
        async for chunk in response.content.iter_any():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                yield event
        assert not rest
