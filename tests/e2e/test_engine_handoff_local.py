"""Two engines, one hands its KV to the other: the tokens are those of one engine alone.

The handoff is a double that copies pages synchronously with the kernels of `kv.copies`; the real
agent and its transports are tested in tests/integration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers")

from baton.engines.interface import DecodeRequest, PrefillRequest
from baton.errors import HandoffError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, KVSent
from baton.kv.copies import PagedSequence, apply_copies, compute_page_copies
from baton.transfer.region import view_pages
from tests.unit.engines.harness import (
    Driver,
    RecordingHandoff,
    make_model,
    make_prompt,
    make_ticket,
    prepare,
)

if TYPE_CHECKING:
    from baton.engines.transformers.loading import LoadedModel
    from baton.handoff.interface import ReceiveOrder, SendOrder
    from baton.ids import TicketId

PROMPT = make_prompt(61)


@dataclass
class LocalHandoff:
    """Copies each layer as soon as it is ready; the last one to be copied lands the handoff.

    With `fails_at_layer` it stops there, as a link does that breaks.
    """

    prefill: Driver = field(init=False)
    decode: Driver = field(init=False)
    fails_at_layer: int | None = None
    num_copied_tokens: int = 0

    def connect(self, loaded: LoadedModel, src: dict[str, int], dst: dict[str, int]) -> None:
        self.prefill = Driver(loaded, _SendingSide(self), **src)
        self.decode = Driver(loaded, RecordingHandoff(), **dst)

    @property
    def orders(self) -> dict[TicketId, ReceiveOrder]:
        return {order.ticket.id: order for order in self.decode.handoff.receives}

    def copy(self, send: SendOrder, layer: int, start: int, stop: int) -> None:
        if layer == self.fails_at_layer:
            return
        receive = self.orders[send.ticket.id]
        assert receive.prompt_hash == send.prompt_hash
        src, dst = self.prefill.engine, self.decode.engine
        copies = compute_page_copies(
            PagedSequence(src.info.layout, send.blocks),
            PagedSequence(dst.info.layout, receive.blocks),
            layer,
            start=max(start, receive.start),
            stop=max(stop, receive.start),
        )
        pages = [view_pages(e.region.memory, e.region.arrays[layer]) for e in (src, dst)]
        apply_copies(copies, *pages)
        self.num_copied_tokens += max(0, stop - max(start, receive.start))

    def hand_over(self, name: str, **sampling: object) -> None:
        """One request, from submission on both sides to the end of its answer."""
        ticket = make_ticket(len(self.prefill.traces) + 1)
        self.decode.submit(name, PROMPT, DecodeRequest(ticket), **sampling)
        self.decode.step()
        self.prefill.submit(name, PROMPT, PrefillRequest(ticket), **sampling)
        self.prefill.run()
        if self.fails_at_layer is None:
            first_token = self.prefill.handoff.first_tokens[ticket.id]
            self.decode.handoff.events = [KVLanded(ticket.id, first_token)]
        else:
            lost = HandoffError("the link broke", stage="landing")
            self.decode.handoff.events = [KVFailed(ticket.id, lost)]
        self.decode.run()
        self.prefill.handoff.events = [KVSent(ticket.id)]
        self.prefill.step()


class _SendingSide(RecordingHandoff):
    def __init__(self, copier: LocalHandoff) -> None:
        super().__init__()
        self._copier, self._done = copier, {}

    def start_send(self, order: SendOrder) -> None:
        super().start_send(order)
        for layer in range(len(self._copier.prefill.engine.region.arrays)):
            self._copier.copy(order, layer, 0, order.num_ready_tokens)
            self._done[order.ticket.id, layer] = order.num_ready_tokens

    def layer_ready(
        self, tickets: list[tuple[TicketId, int]], layer: int, after: object = None
    ) -> None:
        orders = {order.ticket.id: order for order in self.sends}
        for ticket, stop in tickets:
            self._copier.copy(orders[ticket], layer, self._done[ticket, layer], stop)
            self._done[ticket, layer] = stop


def alone(loaded: LoadedModel, **sampling: object) -> list[int]:
    driver = Driver(loaded)
    driver.submit("r", PROMPT, **sampling)
    driver.run()
    return driver.tokens("r")


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({"block_size": 16}, {"block_size": 16}),
        ({"block_size": 16, "max_batch_tokens": 10}, {"block_size": 24}),
        ({"block_size": 24, "max_batch_tokens": 33}, {"block_size": 4}),
    ],
)
def test_tokens_are_those_of_one_engine_alone(
    family: str, src: dict[str, int], dst: dict[str, int]
) -> None:
    loaded = prepare(make_model(family))
    copier = LocalHandoff()
    copier.connect(loaded, src, dst)
    copier.hand_over("r", max_tokens=12)
    assert copier.decode.tokens("r") == alone(loaded, max_tokens=12)
    assert copier.decode.traces["r"].num_received_tokens == len(PROMPT)
    assert copier.prefill.loop.stats().computed_prompt_tokens == len(PROMPT)
    assert copier.decode.loop.stats().computed_prompt_tokens == 0
    copier.prefill.check_all_blocks_are_free()
    copier.decode.check_all_blocks_are_free()


def test_sampled_tokens_and_logprobs_are_those_of_one_engine_alone() -> None:
    loaded = prepare(make_model("llama"))
    sampling = {"temperature": 1.2, "top_p": 0.9, "seed": 5, "max_tokens": 12, "num_logprobs": 2}
    copier = LocalHandoff()
    copier.connect(loaded, {"block_size": 8}, {"block_size": 16})
    copier.hand_over("r", **sampling)
    assert copier.decode.tokens("r") == alone(loaded, **sampling)
    assert all(len(update.token.top) == 2 for update in copier.decode.updates)


def test_prefix_hits_on_both_sides_send_only_what_is_missing() -> None:
    loaded = prepare(make_model("llama"))
    copier = LocalHandoff()
    copier.connect(loaded, {"block_size": 16}, {"block_size": 8})
    copier.prefill.submit("warm", PROMPT[:40])
    copier.prefill.run()
    copier.decode.submit("warm", PROMPT[:30])
    copier.decode.run()
    copier.hand_over("r")
    assert copier.decode.tokens("r") == alone(loaded)
    assert copier.prefill.handoff.sends[0].num_ready_tokens == 32
    assert copier.num_copied_tokens == 2 * (len(PROMPT) - 24)


def test_received_blocks_serve_the_next_request() -> None:
    loaded = prepare(make_model("llama"))
    copier = LocalHandoff()
    copier.connect(loaded, {"block_size": 16}, {"block_size": 8})
    copier.hand_over("r")
    copier.decode.submit("next", PROMPT)
    copier.decode.run()
    assert copier.decode.tokens("next") == alone(loaded)
    assert copier.decode.traces["next"].num_cached_tokens == 56


def test_half_a_handoff_is_computed_again_and_gives_the_same_tokens() -> None:
    loaded = prepare(make_model("llama"))
    copier = LocalHandoff(fails_at_layer=1)
    copier.connect(loaded, {"block_size": 16}, {"block_size": 24})
    copier.hand_over("r")
    assert copier.decode.tokens("r") == alone(loaded)
    assert len(copier.decode.traces["r"].fallbacks) == 1
    copier.decode.handoff.events = [BlocksQuiescent(make_ticket(1).id)]
    copier.decode.step()
    copier.decode.check_all_blocks_are_free()
