"""How much control a handoff takes: counts that are the same on every machine.

Two agents without engines hand over prompts of 32 layers and 128 tokens (`LARGE`), or of another
size. The test's own thread plays both engines and steps both agents whenever they have work, so the
counts do not depend on how threads take turns: what agents do while they wait (ticks, spinning) is
left out. Counted is one handoff of two agents that know each other, from the first order to the
last event; of several such handoffs, the least.

    python -m tests.integration.handoff_counts [shared|tcp] [WRITE|READ] [LAYER_BATCH_BYTES]
        [LAYERS] [TOKENS]

prints the counts and, of Baton's own functions and of system calls, those that run most often.
"""

from __future__ import annotations

import _socket
import select
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import baton
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.handoff.dispatcher import HandoffDispatcher
from baton.handoff.interface import KVLanded, KVSent
from baton.kv.layout import KVLayout
from tests.integration.handoff_nodes import FIRST, make_handoff, node, plain_pages
from tests.integration.layer_trace import has_work

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from baton.handoff.messages import TransferOp
    from tests.integration.handoff_nodes import Handoff, Node

PACKAGE = Path(baton.__file__).parent
NUM_COUNTED = 6


class Prompt(NamedTuple):
    """What is handed over: pages of 16 KiB, each of a layer and 16 tokens."""

    num_layers: int
    num_tokens: int

    @property
    def layout(self) -> KVLayout:
        return KVLayout.gqa(self.num_layers, 8, 16, block_size=16, dtype="float32")


LARGE = Prompt(32, 128)
SMALL = Prompt(4, 32)
NAMED = {
    ("handoff/agent_loop.py", "AgentLoop.call"): "commands from engines to agents",
    ("handoff/agent.py", "HandoffAgent._emit"): "engine wake-ups",
    ("handoff/link.py", "Link.send"): "control messages",
    ("net/framing.py", "encode_frame"): "frames, the transports' own included",
    ("handoff/agent_loop.py", "AgentLoop.step"): "steps of the agents",
}
"""`(file, function)` → what is counted where it is called. Each must be called: a name that has
changed would be counted as 0."""
PYTHON_CALLS = "Python calls"
SYSTEM_CALLS = "system calls"
_KERNEL_OBJECTS = (_socket.socket, select.epoll, type(select.poll()))
_NO_SYSTEM_CALL = {"fileno", "gettimeout", "fspath", "scandir", "get_inheritable"}


class HandoffCounts:
    """What runs in the work given to `run`, by name, and by function."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` on this thread and count its calls."""
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        if event == "call":
            self._note_python(frame)
        elif event == "c_call" and is_system_call(called):
            self.totals[SYSTEM_CALLS] += 1
            self.functions[f"system call {called.__name__}"] += 1

    def _note_python(self, frame: FrameType) -> None:
        self.totals[PYTHON_CALLS] += 1
        path = frame.f_code.co_filename
        if not path.startswith(str(PACKAGE)):
            return
        file, function = path[len(str(PACKAGE)) + 1 :], frame.f_code.co_qualname
        self.functions[f"{file} {function}"] += 1
        if (file, function) in NAMED:
            self.totals[NAMED[file, function]] += 1


def is_system_call(called: object) -> bool:
    """Whether a builtin enters the kernel: methods of sockets and epoll, functions of `os`."""
    if called.__name__ in _NO_SYSTEM_CALL:
        return False
    owner = getattr(called, "__self__", None)
    is_of_os = getattr(called, "__module__", None) == "posix"
    return is_of_os or isinstance(owner, _KERNEL_OBJECTS)


def count_handoff(
    kind: str, op: TransferOp, layer_batch_bytes: int, prompt: Prompt = LARGE
) -> tuple[dict[str, int], Counter[str]]:
    """Hand prompts over by the transport `kind`: the least counts of one, by name and by function.

    Prefill WRITEs, or decode READs. Layers go out together as by `handoff.layer_batch_bytes`; a
    `LARGE` prompt has 4 MiB, a `SMALL` one 128 KiB.
    """
    key = Credentials.of(ClusterKey(bytes(32)))
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                node(
                    name, kinds=(kind,), key=key, is_stepped=True,
                    pages=stack.enter_context(plain_pages(prompt.layout)),
                    layer_batch_bytes=layer_batch_bytes, op=op,
                )
            )
            for name in ("prefill", "decode")
        )  # fmt: skip
        prefill.scribble(3)
        _hand_over(prefill, decode, HandoffCounts(), prompt, seed=1)  # they meet; plans are made
        for each in (prefill, decode):
            each.agent.loop._next_tick = float("inf")
        handoffs = [HandoffCounts() for _ in range(NUM_COUNTED)]
        for seed, counts in enumerate(handoffs, 2):
            _hand_over(prefill, decode, counts, prompt, seed=seed)
    names = {name for each in handoffs for name in each.totals}
    least = {name: min(each.totals[name] for each in handoffs) for name in names}
    return least, min(handoffs, key=lambda each: each.totals[PYTHON_CALLS]).functions


def _hand_over(
    prefill: Node, decode: Node, counts: HandoffCounts, prompt: Prompt, seed: int
) -> None:
    handoff = make_handoff(prefill, decode, num_tokens=prompt.num_tokens, seed=seed)
    ticket, nodes = handoff.sending.ticket.id, (prefill, decode)
    sending, receiving = (HandoffDispatcher(each.agent, None) for each in nodes)
    layers = range(prompt.num_layers)
    commands: list[Callable[[], object]] = [
        lambda: receiving.start_receive(handoff.receiving),
        lambda: sending.start_send(handoff.sending),
        *(partial(sending.layer_ready, [(ticket, prompt.num_tokens)], layer) for layer in layers),
        lambda: sending.prefill_done(ticket, FIRST),
    ]
    for command in commands:
        counts.run(command)
        _settle(nodes, counts)
    _check(handoff, counts)


def _settle(nodes: tuple[Node, Node], counts: HandoffCounts) -> None:
    """Step both until neither has anything to do."""
    while any(has_work(each.agent) for each in nodes):
        for each in nodes:
            if has_work(each.agent):
                counts.run(each.agent.loop.step)


def _check(handoff: Handoff, counts: HandoffCounts) -> None:
    """Both engines take their events, and the bytes are there."""
    events = []
    for each in (handoff.decode, handoff.prefill):
        counts.run(lambda each=each: events.extend(each.agent.poll()))
    ticket = handoff.sending.ticket.id
    assert events == [KVLanded(ticket, FIRST), KVSent(ticket)], events
    handoff.check_bytes()


def main() -> None:
    """Print the counts."""
    given = sys.argv[1:]
    kind, op, *numbers = *given, *("shared", "WRITE", 4 << 20, *LARGE)[len(given) :]
    layer_batch_bytes, num_layers, num_tokens = map(int, numbers)
    prompt = Prompt(num_layers, num_tokens)
    counts, functions = count_handoff(kind, op, layer_batch_bytes, prompt)
    for name, number in sorted(counts.items()):
        print(f"{number:8} {name}")
    print("\nof one handoff:")
    for name, number in functions.most_common(60):
        print(f"{number:8} {name}")


if __name__ == "__main__":
    main()
