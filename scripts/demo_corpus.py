"""Plain-text novels in, training documents out: chapters of prose, and small chats made of it.

A chapter is a tuple of paragraphs, each on one line; headings, title pages and closing notes are
left out. A chat is cut from a chapter: the user gives an opening, a name or a remark, the assistant
answers with what the novel says next. Only the short questions around it are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator

Chapter = tuple[str, ...]

_HEADING = re.compile(r"\n\s*(?:VOLUME [IVX]+\s+)?(?:CHAPTER|Chapter) (?:[IVXLC]+|\d+)\.?[ ]*\n")
_CLOSING = re.compile(r"\n\s*(?:FINIS|Finis|THE END)\s*(?:\n|$)")
_SENTENCE_END = re.compile(r"(?<![MDS]r\.)(?<!Mrs\.)(?<!St\.)(?<=[.!?])[\"']?\s+")
_NAME = re.compile(
    r"(?<=[a-z,] )(?:Mr\. |Mrs\. |Miss |Sir |Lady |Captain |Colonel )?[A-Z][a-z]{3,}"
)
_MIN_CHAPTER_CHARS = 1500
_MIN_PARAGRAPH_CHARS = 2
HELD_OUT_EVERY = 20
"""One chapter in so many is kept out, to measure what was learnt rather than remembered."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a novelist.",
    "Answer in one paragraph.",
    "You tell stories.",
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Chapters to learn from, and chapters to measure with."""

    training: tuple[Chapter, ...]
    held_out: tuple[Chapter, ...]


def read_corpus(texts: Iterable[str]) -> Corpus:
    """Clean and split the texts; the same texts in the same order give the same split."""
    chapters = [chapter for text in texts for chapter in split_chapters(text)]
    return Corpus(
        training=tuple(c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY),
        held_out=tuple(chapters[::HELD_OUT_EVERY]),
    )


def split_chapters(text: str) -> Iterator[Chapter]:
    """The chapters of one novel, without its title page and closing note."""
    body = _CLOSING.split("\n" + text)[0]
    sections = _HEADING.split(body)
    for section in sections[1:] or sections:
        paragraphs = tuple(_clean_paragraphs(section))
        if sum(map(len, paragraphs)) >= _MIN_CHAPTER_CHARS:
            yield paragraphs


def _clean_paragraphs(section: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", section):
        paragraph = " ".join(block.replace("_", "").split())
        if len(paragraph) >= _MIN_PARAGRAPH_CHARS and "*" not in paragraph:
            yield paragraph


def make_chat(chapter: Chapter, rng: random.Random) -> list[Message]:
    """A chat of one or more turns whose answers are consecutive paragraphs of `chapter`."""
    start = rng.randrange(len(chapter))
    num_turns = rng.choices((1, 2, 3), weights=(70, 20, 10))[0]
    messages = []
    if rng.random() < 0.3:
        messages.append(Message("system", rng.choice(SYSTEM_PROMPTS)))
    position = start
    for _ in range(num_turns):
        turn, position = _make_turn(chapter, position, rng)
        messages += turn
        if position >= len(chapter):
            break
    return messages


def _make_turn(chapter: Chapter, position: int, rng: random.Random) -> tuple[list[Message], int]:
    paragraph = chapter[position]
    following = chapter[position + 1 : position + 2]
    kind = rng.random()
    if following and len(paragraph) < 400 and kind < 0.5:
        return [_user(paragraph), _assistant(_shorten(following[0], rng))], position + 2
    answer = _shorten(paragraph, rng)
    names = sorted(set(_NAME.findall(answer)))
    if names and kind < 0.75:
        asked = rng.choice(("Tell me about {}.", "Who is {}?", "Write about {}.", "What of {}?"))
        return [_user(asked.format(rng.choice(names))), _assistant(answer)], position + 1
    words = answer.split()
    num_given = rng.randint(2, max(2, min(16, len(words) // 2)))
    opening, rest = " ".join(words[:num_given]), " ".join(words[num_given:])
    framed = rng.choice(("Continue: {}", "{}", "Continue the story: {}", "Write on: {}"))
    return [_user(framed.format(opening)), _assistant(rest or answer)], position + 1


def _shorten(paragraph: str, rng: random.Random) -> str:
    """The paragraph's first few sentences, so that answers end and are not always long."""
    ends = [match.start() for match in _SENTENCE_END.finditer(paragraph)]
    keep = rng.randint(1, 5)
    if len(ends) <= keep:
        return paragraph
    end = ends[keep - 1]
    closing_quote = paragraph[end] if paragraph[end] in "\"'" else ""
    return paragraph[:end] + closing_quote


def _user(content: str) -> Message:
    return Message("user", content)


def _assistant(content: str) -> Message:
    return Message("assistant", content)
