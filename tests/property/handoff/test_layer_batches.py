"""Prompts in random chunks, several in a step: the agent learns of each layer, none too early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.handoff.agent import LayerBatcher, ReadyLayers
from tests.unit.handoff.orders import make_ticket, send_order

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket

NUM_LAYERS = 5
LAYER_TOKEN_BYTES = 10


@dataclass
class Prompt:
    """What is computed of one prompt, and what the agent knows of that."""

    ticket: Ticket
    chunks: list[int]
    batch_bytes: int
    computed: list[int] = field(default_factory=lambda: [0] * NUM_LAYERS)
    known: list[int] = field(default_factory=lambda: [0] * NUM_LAYERS)
    num_notices: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.chunks)

    @property
    def unknown_bytes(self) -> int:
        pairs = zip(self.computed, self.known, strict=True)
        return LAYER_TOKEN_BYTES * sum(computed - known for computed, known in pairs)

    def notify(self, ready: ReadyLayers) -> None:
        self.num_notices += 1
        for layer in ready.layers:
            assert self.known[layer] <= ready.stop <= self.computed[layer]
            self.known[layer] = ready.stop


chunks = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.lists(chunks, min_size=1, max_size=3),
    st.integers(0, 2500),
    st.permutations(range(NUM_LAYERS)),
    st.data(),
)
def test_every_layer_is_announced_once_it_is_there(all_chunks, batch_bytes, order, data):
    """Of a prompt whose beginning alone is handed over at once, whatever the batch."""
    batcher = LayerBatcher(
        batch_bytes, num_layers=NUM_LAYERS, bytes_per_token=NUM_LAYERS * LAYER_TOKEN_BYTES
    )
    prompts, traces, at = {}, {}, 0.0
    for of_prompt in all_chunks:
        num_prefix_tokens = data.draw(st.sampled_from((0, 0, 1, 64)))
        ticket = replace(make_ticket(), num_prefix_tokens=num_prefix_tokens)
        prompt = Prompt(ticket, of_prompt, 0 if num_prefix_tokens else batch_bytes)
        prompts[prompt.ticket.id] = prompt
        offered = send_order(prompt.ticket, num_tokens=prompt.num_tokens)
        traces[prompt.ticket.id] = offered.trace
        batcher.add(offered)
    while prompts:
        step = data.draw(st.lists(st.sampled_from(list(prompts)), min_size=1, unique=True))
        stops = {
            ticket: prompts[ticket].computed[0] + prompts[ticket].chunks.pop(0) for ticket in step
        }
        for layer in order:
            at += 1.0
            for ticket, stop in stops.items():
                prompts[ticket].computed[layer] = stop
            for ready in batcher.layer_ready(list(stops.items()), layer, at):
                prompts[ready.ticket].notify(ready)
            # Some hooks come twice.
            assert batcher.layer_ready(list(stops.items()), layer, at + 0.5) == ()
            for ticket in stops:
                assert traces[ticket].layers_ready[layer] == at
            for prompt in prompts.values():
                # Of the chunk before and of this one, each at most a batch.
                assert prompt.unknown_bytes <= 2 * prompt.batch_bytes
        for ticket in step:
            if not prompts[ticket].chunks:
                prompt = prompts.pop(ticket)
                rest = batcher.take(ticket)
                if rest is not None:
                    prompt.notify(rest)
                assert prompt.known == [stops[ticket]] * NUM_LAYERS
                num_bytes = prompt.known[0] * NUM_LAYERS * LAYER_TOKEN_BYTES
                assert num_bytes > prompt.batch_bytes or prompt.num_notices == 1
                assert batcher.layer_ready([(ticket, stops[ticket])], 0, 1.0) == ()


def test_a_prompt_that_is_computed_again_is_announced_again():
    batcher = LayerBatcher(100, num_layers=2, bytes_per_token=20)
    ticket = make_ticket()
    batcher.add(send_order(ticket, num_tokens=16))
    assert batcher.layer_ready([(ticket.id, 11)], 0, 1.0) == (ReadyLayers(ticket.id, [0], 11),)
    assert batcher.layer_ready([(ticket.id, 8)], 0, 1.0) == ()  # preempted, and begun anew
    assert batcher.layer_ready([(ticket.id, 8)], 1, 1.0) == (ReadyLayers(ticket.id, [0, 1], 8),)


def test_each_layer_goes_by_itself_where_a_beginning_alone_is_handed_over():
    """Beside a prompt of which all is: its layers wait for one another still."""
    batcher = LayerBatcher(1 << 30, num_layers=3, bytes_per_token=30)
    whole, prefix = make_ticket(), replace(make_ticket(), num_prefix_tokens=16)
    for ticket in (whole, prefix):
        batcher.add(send_order(ticket, num_tokens=16))
    for stop in (7, 16):
        for layer in range(3):
            found = batcher.layer_ready([(whole.id, stop), (prefix.id, stop)], layer, 1.0)
            assert found == (ReadyLayers(prefix.id, [layer], stop),)
    assert batcher.take(whole.id) == ReadyLayers(whole.id, [0, 1, 2], 16)
    assert batcher.take(prefix.id) is None


def test_what_was_ready_before_counts_not():
    batcher = LayerBatcher(100, num_layers=1, bytes_per_token=10)
    ticket = make_ticket()
    batcher.add(send_order(ticket, num_tokens=50, num_ready_tokens=40))
    assert batcher.layer_ready([(ticket.id, 50)], 0, 1.0) == ()
    assert batcher.take(ticket.id) == ReadyLayers(ticket.id, [0], 50)
    assert batcher.take(ticket.id) is None
