"""A request that computes the tokens it is given, and generates from where it is told to."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from baton.engines.interface import DecodeRequest, NewToken, TokensComputed
from baton.errors import InvalidRequestError
from baton.handoff.interface import KVLanded
from baton.ids import RequestId
from tests.examples import examples
from tests.unit.engines.harness import (
    VOCAB_SIZE,
    Driver,
    RecordingHandoff,
    make_prompt,
    make_ticket,
    tiny_llama,
)

NUM_PROMPT, NUM_TOKENS = 20, 24
PROMPT = make_prompt(NUM_PROMPT)
SEEDED = {"temperature": 1.0, "seed": 7}


def answer(**sampling: object) -> list[int]:
    driver = Driver(tiny_llama())
    driver.submit("r", PROMPT, max_tokens=NUM_TOKENS, **sampling)
    driver.run()
    return driver.tokens("r")


WHOLE = answer(**SEEDED)


def submit_standby(driver: Driver, num_known: int, leg: DecodeRequest | None = None) -> None:
    """As a worker asks for it: the answer's first tokens are part of the prompt."""
    driver.submit(
        "r",
        np.concatenate([PROMPT, np.array(WHOLE[:num_known], np.int32)]),
        leg,
        is_standby=True,
        max_tokens=NUM_TOKENS - num_known,
        first_index=num_known,
        **SEEDED,
    )


def extend(driver: Driver, start: int, stop: int, *, generates: bool = False) -> None:
    driver.loop.extend(RequestId("r"), WHOLE[start:stop], generates=generates)


def computed(driver: Driver) -> list[int]:
    return [u.num_tokens for u in driver.updates if isinstance(u, TokensComputed)]


def test_it_computes_and_samples_nothing_until_it_is_to_generate() -> None:
    driver = Driver(tiny_llama())
    submit_standby(driver, 3)
    driver.run()
    assert computed(driver) == [NUM_PROMPT + 3]
    assert not driver.loop.step(), "it waits without turning"
    extend(driver, 3, 5)
    driver.run()
    assert computed(driver) == [NUM_PROMPT + 3, NUM_PROMPT + 5]
    assert driver.tokens("r") == []
    before = driver.loop.stats()
    assert (before.num_running, before.output_tokens) == (1, 0)
    extend(driver, 5, 6, generates=True)
    driver.step()
    assert driver.tokens("r") == WHOLE[6:7], "one step after the last token came"
    driver.run()
    assert driver.tokens("r") == WHOLE[6:]
    extend(driver, 0, 2)  # too late: it is forgotten
    driver.check_all_blocks_are_free()


@settings(max_examples=examples(15), deadline=None)
@given(
    cuts=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=2, max_size=6, unique=True).map(sorted),
    num_others=st.integers(0, 3),
    num_blocks=st.integers(24, 64),
    max_batch_tokens=st.integers(3, 40),
    num_steps=st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_it_goes_on_with_the_same_tokens_whatever_happens(
    cuts: list[int],
    num_others: int,
    num_blocks: int,
    max_batch_tokens: int,
    num_steps: list[int],
) -> None:
    """Wherever it is fed and cut, beside others, also where it loses its blocks meanwhile."""
    driver = Driver(
        tiny_llama(), block_size=4, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens
    )
    for number in range(num_others):
        driver.submit(f"other{number}", make_prompt(20, number + 1), max_tokens=30)
    submit_standby(driver, cuts[0])
    for (start, stop), steps in zip(pairwise(cuts), num_steps, strict=False):
        driver.step(steps)
        assert driver.tokens("r") == []
        extend(driver, start, stop, generates=stop == cuts[-1])
    driver.run()
    assert driver.tokens("r") == WHOLE[cuts[-1] :]
    numbers = computed(driver)
    assert all(number <= NUM_PROMPT + cuts[-1] for number in numbers)
    driver.check_all_blocks_are_free()


def test_it_loses_its_blocks_and_computes_them_again() -> None:
    """The property above need not reach this: here it is seen."""
    driver = Driver(tiny_llama(), block_size=4, num_blocks=14)
    driver.submit("older", make_prompt(20, 1), max_tokens=32)
    driver.step()
    submit_standby(driver, 2)
    driver.step(2)
    assert computed(driver) == [NUM_PROMPT + 2]
    driver.run()
    assert driver.loop.stats().num_preemptions == 1
    extend(driver, 2, 4)
    driver.run()
    assert computed(driver)[-1] == NUM_PROMPT + 4
    extend(driver, 4, 5, generates=True)
    driver.run()
    assert driver.tokens("r") == WHOLE[5:]


def test_it_takes_the_blocks_of_a_younger_request_that_decodes() -> None:
    """Several tokens at once come after one that decodes, in the same step."""
    alone = Driver(tiny_llama(), block_size=4)
    alone.submit("younger", make_prompt(20, 1), max_tokens=32)
    alone.run()
    driver = Driver(tiny_llama(), block_size=4, num_blocks=14)
    submit_standby(driver, 2)
    driver.submit("younger", make_prompt(20, 1), max_tokens=32)
    driver.step(11)
    assert (len(driver.tokens("younger")), driver.loop.stats().num_free_blocks) == (11, 0)
    extend(driver, 2, 6)
    driver.step()
    assert driver.loop.stats().num_preemptions == 1
    assert computed(driver)[-1] == NUM_PROMPT + 6
    extend(driver, 6, 8, generates=True)
    driver.run()
    assert driver.tokens("r") == WHOLE[8:]
    assert driver.tokens("younger") == alone.tokens("younger")
    driver.check_all_blocks_are_free()


def test_it_receives_what_is_handed_over_and_computes_the_rest() -> None:
    handoff = RecordingHandoff()
    driver = Driver(tiny_llama(), handoff, block_size=8)
    ticket = msgspec.structs.replace(make_ticket(), num_prefix_tokens=16)
    submit_standby(driver, 3, DecodeRequest(ticket))
    driver.step()
    (order,) = handoff.receives
    assert (order.start, order.num_tokens) == (0, 16)
    assert computed(driver) == []
    handoff.events.append(KVLanded(ticket.id, None))
    driver.run()
    assert computed(driver) == [NUM_PROMPT + 3]
    assert driver.traces["r"].num_received_tokens == 16
    extend(driver, 3, 4, generates=True)
    driver.step()
    (token,) = (u for u in driver.updates if isinstance(u, NewToken))
    assert token.finish is None


def test_a_standby_that_is_cancelled_frees_its_blocks() -> None:
    driver = Driver(tiny_llama())
    submit_standby(driver, 3)
    driver.run()
    driver.loop.cancel(RequestId("r"))
    driver.check_all_blocks_are_free()
    extend(driver, 3, 4)
    assert not driver.loop.step()


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    engine = Driver(tiny_llama()).engine
    with pytest.raises(InvalidRequestError, match="token ids go from 0"):
        engine.extend(RequestId("r"), [VOCAB_SIZE], generates=False)
