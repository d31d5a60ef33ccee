"""Clients that ask for the same greedy streams again and again, and compare every answer."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S: Final = 60.0
"""Without a byte."""
END: Final = b"data: [DONE]"


class Choice(msgspec.Struct):
    """One choice of a part of a stream."""

    text: str = ""


class Part(msgspec.Struct):
    """One event of a stream."""

    choices: tuple[Choice, ...] = ()


class Model(msgspec.Struct):
    """One model of a list."""

    id: str


class Models(msgspec.Struct):
    """OpenAI's list of models."""

    data: tuple[Model, ...]


@dataclass
class GreedyLoad:
    """`failures` has a line for each answer that is not what it was before, and why.

    `longest_gap_s`: between two parts of an answer. `first_token_s`: the first answer of one token.
    `known` are the right answers by prompt, where another server has given them already.
    """

    url: str
    prompts: tuple[str, ...]
    max_tokens: int
    known: dict[str, str] = field(default_factory=dict)
    num_clients: int | None = None
    """One for each prompt, if not given."""
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    first_token_s: float = 0.0
    _model: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self) -> None:
        """Ask for each answer that is not known once, while nothing happens."""
        connection, begun = self._connect(), time.monotonic()
        connection.request("GET", "/v1/models")
        self._model = msgspec.json.decode(connection.getresponse().read(), type=Models).data[0].id
        connection.close()
        self.max_tokens, whole = 1, self.max_tokens
        self.ask(self.prompts[0])
        self.first_token_s = time.monotonic() - begun
        self.max_tokens = whole
        for prompt in self.prompts:
            if prompt not in self.known:
                self.known[prompt] = self.ask(prompt)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clients that ask without a pause, until the block ends and each has its last answer."""
        ending, num_clients = threading.Event(), self.num_clients or len(self.prompts)
        shares = [self.prompts[number::num_clients] for number in range(num_clients)]
        clients = [threading.Thread(target=self._repeat, args=(share, ending)) for share in shares]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            ending.set()
            for client in clients:
                client.join(2 * TIMEOUT_S)

    def _repeat(self, prompts: tuple[str, ...], ending: threading.Event) -> None:
        for prompt in itertools.cycle(prompts):
            if ending.is_set():
                return
            try:
                text = self.ask(prompt)
                wrong = None if text == self.known[prompt] else f"other tokens: {text!r}"
            except (OSError, http.client.HTTPException, AssertionError) as exc:
                wrong = f"{type(exc).__name__}: {exc}"
            with self._lock:
                self.num_answers += 1
                if wrong is not None:
                    self.failures.append(wrong)

    def ask(self, prompt: str) -> str:
        """One answer's text.

        Raises:
            AssertionError: it is no whole answer.
        """
        connection = self._connect()
        try:
            body = {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "stream": True,
            }
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise AssertionError(f"HTTP {answer.status}: {answer.read(300)!r}")
            return self._read(answer)
        finally:
            connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> str:
        text: list[str] = []
        before = time.monotonic()
        while line := answer.readline():
            now = time.monotonic()
            with self._lock:
                self.longest_gap_s = max(self.longest_gap_s, now - before)
            before = now
            if line.startswith(END):
                return "".join(text)
            if line.startswith(b"data: "):
                part = msgspec.json.decode(line.removeprefix(b"data: "), type=Part)
                if not part.choices and b'"error"' in line:
                    raise AssertionError(f"an error in the stream: {line!r}")
                text += [choice.text for choice in part.choices]
        raise AssertionError("the stream ended before its end")

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
