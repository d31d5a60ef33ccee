from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from baton.worker.stop_strings import Passed, Stopped, StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Letter by letter: the first moment at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    watch = StopStrings(stops)
    shown = ""
    for piece in pieces:
        match watch.push(piece):
            case Passed(text):
                shown += text
            case Stopped(text):
                return shown + text, True
    return shown + watch.flush(), False


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=6))
def test_the_answer_is_the_same_however_its_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert run(pieces, stops) == expected(text, stops)


@given(TEXT, STOPS)
def test_nothing_that_is_shown_is_taken_back(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    final, _ = expected(text, stops)
    shown = ""
    for letter in text:
        step = watch.push(letter)
        shown += step.text
        assert final.startswith(shown)
        if isinstance(step, Stopped):
            break


def test_text_is_held_back_only_while_it_could_begin_a_stop() -> None:
    watch = StopStrings(["\n\n"])
    assert watch.push("a\n") == Passed("a")
    assert watch.push("b") == Passed("\nb")
    assert watch.push("\n\nc") == Stopped("")
