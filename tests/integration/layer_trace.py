"""Which Python functions run, in which files, when one layer of a prompt is pushed.

Two agents without engines hand over a prompt; the test's own thread steps both, so the counts do
not depend on how threads take turns. Counted is what runs from `layer_ready` on the prefill worker
until the decode worker has counted the layer, ticks and idle steps left out. It is layer 1, after
layer 0 has landed and both agents are idle: what a handoff plans once, for all its layers, is in
the trace of layer 0 (`... tcp 0`), and in that of no other.

    python -m tests.integration.layer_trace [tcp|shared] [LAYER]   prints the calls, in order
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import baton
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.handoff.dispatcher import HandoffDispatcher
from tests.integration.handoff_nodes import Handoff, Node, make_handoff, node

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from baton.handoff.agent import HandoffAgent

PACKAGE = Path(baton.__file__).parent
NUM_TOKENS = 64
MAX_ROUNDS = 200
TYPICAL_LAYER = 1
"""Neither the first nor the last one of the prompt."""


@dataclass
class LayerTrace:
    """The calls of Baton's own functions, `(file, function)`, in order."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Files in which something ran, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    def ran(self, file: str, function: str) -> bool:
        """Whether this function was called."""
        return (file, function) in self.calls

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` on this thread and add its calls."""
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            self.calls.append((path[len(str(PACKAGE)) + 1 :], frame.f_code.co_qualname))


def has_work(agent: HandoffAgent) -> bool:
    """Whether a step would find something to do."""
    return bool(agent.loop._selector.select(0))


def step_until(nodes: tuple[Node, Node], is_done: Callable[[], bool], trace: LayerTrace) -> None:
    """Step whoever has work, until it is done."""
    for _ in range(MAX_ROUNDS):
        for each in nodes:
            if has_work(each.agent):
                trace.run(each.agent.loop.step)
        if is_done():
            return
    raise AssertionError("the agents came to no end")


def settle(nodes: tuple[Node, Node]) -> None:
    """Step both until neither has anything to do."""
    while any(has_work(each.agent) for each in nodes):
        for each in nodes:
            if has_work(each.agent):
                each.agent.loop.step()


def trace_layer(kind: str, layer: int = TYPICAL_LAYER) -> LayerTrace:
    """Push a prompt's layers up to this over the transport `kind`; what ran for this one."""
    key = Credentials.of(ClusterKey(bytes(32)))
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(node(name, kinds=(kind,), key=key, is_stepped=True))
            for name in ("prefill", "decode")
        )
        nodes = (prefill, decode)
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS)
        handoff.start_receive()
        handoff.start_send()
        ticket = handoff.sending.ticket.id
        step_until(nodes, lambda: _is_ready(handoff), LayerTrace())
        settle(nodes)
        for before in range(layer):
            prefill.agent.layer_ready([(ticket, NUM_TOKENS)], before)
            step_until(nodes, partial(_has_landed, handoff, before), LayerTrace())
            settle(nodes)
        for each in nodes:
            each.agent.loop._next_tick = float("inf")
        trace = LayerTrace()
        port = HandoffDispatcher(prefill.agent, None)  # what an engine calls
        trace.run(lambda: port.layer_ready([(ticket, NUM_TOKENS)], layer))
        step_until(nodes, partial(_has_landed, handoff, layer), trace)
        return trace


def _is_ready(handoff: Handoff) -> bool:
    outgoing = handoff.prefill.agent.loop.sending._outgoing.get(handoff.sending.ticket.id)
    return outgoing is not None and str(outgoing.session.phase) == "sending"


def _has_landed(handoff: Handoff, layer: int) -> bool:
    incoming = handoff.decode.agent.loop.receiving._incoming[handoff.sending.ticket.id]
    return all(gap.layer != layer for gap in incoming.session.coverage.gaps())


def main() -> None:
    """Print the calls."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "tcp"
    layer = int(sys.argv[2]) if len(sys.argv) > 2 else TYPICAL_LAYER
    trace = trace_layer(kind, layer)
    for file, function in trace.calls:
        print(f"{file:45} {function}")
    print(f"{kind}: {len(trace.calls)} calls in {len(trace.files)} files")


if __name__ == "__main__":
    main()
