"""Which workers hold which prefixes: a tree of named blocks, each with sets of workers as bits.

    held    workers that hold the block, or are expected to
    expected    of these, workers that have not reported it
    whole   workers that hold it and every block before it: what a prompt can be served from

`whole` only shrinks on the way from a root to a leaf, so that the blocks of a prompt at which it
changes are found by bisection: two lookups where all workers agree. What a worker holds without
the blocks before it (the engine dropped one in the middle) comes back by itself once they do.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.ids import WorkerId

MAX_BLOCKS: Final = 1 << 22
"""Of one index; what is stored beyond that is not known here, as if it had not been published, nor
what follows it: no prompt could find that."""
NUM_WALKED: Final = 8
"""Blocks that are walked one by one: where sets change at most blocks, bisection costs more."""
_ALL: Final = -1

log = logging.getLogger(__name__)


class _Node(msgspec.Struct, eq=False):
    """One block. `parent` None: it is the root.

    A struct rather than a class with slots: millions are made, and its constructor is in C.
    """

    name: int
    parent: _Node | None
    held: int
    whole: int
    children: dict[int, _Node] | _Node | None = None
    expected: int = 0

    def add(self, child: _Node) -> None:
        """Most blocks have one successor: a dict only where there are more."""
        if self.children is None:
            self.children = child
        elif isinstance(self.children, _Node):
            self.children = {self.children.name: self.children, child.name: child}
        else:
            self.children[child.name] = child

    def drop(self, child: _Node) -> None:
        if isinstance(self.children, dict):
            del self.children[child.name]
            if not self.children:
                self.children = None
        else:
            self.children = None

    def each_child(self) -> Iterable[_Node]:
        if self.children is None:
            return ()
        return (self.children,) if isinstance(self.children, _Node) else self.children.values()


class PrefixIndex:
    """The blocks of one size of one model's workers. Owner: one thread."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._root = _Node(0, None, _ALL, _ALL)
        self._nodes: dict[int, _Node] = {}
        self._bits: dict[WorkerId, int] = {}
        self._workers: list[WorkerId] = []
        self._free: list[int] = []
        self._members = lru_cache(maxsize=256)(self._list_members)
        self.num_refused = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that some worker holds, and those that are known as the ones before them."""
        return len(self._nodes)

    def store(self, worker: WorkerId, names: Sequence[int], after: int | None) -> int:
        """It holds these blocks, each following the one before it, the first following `after`.

        `after` None: they begin a sequence. Where it is not known, they are refused; so are the
        last ones, for which there is no room. Returns how many are.
        """
        bit = self._bit_of(worker)
        node = self._root if after is None else self._nodes.get(after)
        if node is None:
            return len(names)
        nodes, most = self._nodes, self._max_blocks
        for at, name in enumerate(names):
            if name not in nodes and len(nodes) < most:  # the usual case, and the hot one
                child = nodes[name] = _Node(name, node, bit, node.whole & bit)
                if node.children is None:
                    node.children = child
                else:
                    node.add(child)
                node = child
                continue
            found = nodes.get(name)
            if found is None:
                self._prune(node)
                return len(names) - at
            found.held |= bit
            found.expected &= ~bit
            if node.whole & bit and not found.whole & bit:
                found.whole |= bit
                if found.children is not None:
                    self._complete(found, bit)
            node = found
        return 0

    def note_refused(self, num: int) -> None:
        """So many blocks that a worker has reported found no room."""
        if not self.num_refused:
            log.warning(
                "%d cached blocks are known, and no more can be: who has the others is not known",
                self._max_blocks,
            )
        self.num_refused += num

    def expect(self, worker: WorkerId, names: Sequence[int], after: int | None) -> None:
        """As `store`, of blocks that it has not reported: they count until `drop_expected`.

        What follows a block that was evicted in the meantime is not expected.
        """
        if after is not None and after not in self._nodes:
            return
        bit, get = self._bit_of(worker), self._nodes.get
        reported = {
            name
            for name in names
            if (node := get(name)) is not None and node.held & ~node.expected & bit
        }
        self.store(worker, names, after)
        for name in names:
            node = get(name)
            if node is not None and name not in reported:
                node.expected |= node.held & bit

    def drop_expected(self, worker: WorkerId, names: Iterable[int]) -> None:
        """It has not stored these, as far as it has not reported them since."""
        bit, get = self._bits.get(worker, 0), self._nodes.get
        late = [n for n in names if (node := get(n)) is not None and node.expected & bit]
        self.remove(worker, late)

    def remove(self, worker: WorkerId, names: Iterable[int]) -> None:
        """It does not hold these any more."""
        bit = self._bits.get(worker, 0)
        for name in names:
            node = self._nodes.get(name)
            if node is None or not node.held & bit:
                continue
            node.held &= ~bit
            node.expected &= ~bit
            if node.whole & bit:
                _break(node, bit)
            self._prune(node)

    def forget(self, worker: WorkerId) -> None:
        """It is gone, and all that it held was removed before: its place is another's."""
        bit = self._bits.pop(worker, 0)
        if bit:
            self._free.append(bit.bit_length() - 1)
            self._members.cache_clear()

    def count_held(self, worker: WorkerId, names: Sequence[int]) -> int:
        """How many of these a worker holds, from the first on, whatever comes before that."""
        bit, get = self._bits.get(worker, 0), self._nodes.get
        for num, name in enumerate(names):
            node = get(name)
            if node is None or not node.held & bit:
                return num
        return len(names)

    def find_matches(self, names: Sequence[int]) -> dict[WorkerId, int]:
        """How many of these each worker holds from the first on; those that hold none are left out.

        `names` follow one another, and the first begins a sequence.
        """
        if not names:
            return {}
        get, num = self._nodes.get, len(names)
        node = get(names[0])
        if node is None or not (before := node.whole):
            return {}
        node = get(names[num - 1])
        last = 0 if node is None else node.whole
        matches = dict.fromkeys(self._members(last), num) if last else {}
        workers, start = self._workers, 0
        ahead = [(num - 1, last)]
        while ahead:
            stop, after = ahead[-1]
            if before != after and stop - start > NUM_WALKED:
                middle = (start + stop) // 2
                node = get(names[middle])
                ahead.append((middle, 0 if node is None else node.whole))
                continue
            ahead.pop()
            at = start
            while before != after:
                at += 1
                node = get(names[at])
                left = 0 if node is None else node.whole
                ended, before = before ^ left, left
                while ended:
                    top = ended.bit_length() - 1
                    matches[workers[top]] = at
                    ended ^= 1 << top
            start = stop
        return matches

    def holdings(self) -> dict[WorkerId, set[int]]:
        """All that each worker holds; for checks."""
        return {
            worker: {name for name, node in self._nodes.items() if node.held & bit}
            for worker, bit in self._bits.items()
        }

    def check_invariants(self) -> None:
        """Raise AssertionError where sets and tree disagree.

        Raises:
            AssertionError: `whole` is not what `held` and the block before make it, or a block is
                kept that no worker holds and nothing follows.
        """
        for name, node in self._nodes.items():
            before = 0 if node.parent is None else node.parent.whole
            if node.whole != node.held & before:
                raise AssertionError(f"block {name:x}: whole {node.whole:x} of held {node.held:x}")
            if node.expected & ~node.held:
                raise AssertionError(f"block {name:x} is expected of a worker and not counted")
            if not node.held and node.children is None:
                raise AssertionError(f"block {name:x} is held by no worker and nothing follows it")
            if any(child.parent is not node for child in node.each_child()):
                raise AssertionError(f"block {name:x} has a child of another")
            if self._nodes.get(node.name) is not node or node.name != name:
                raise AssertionError(f"block {name:x} is listed under another name")
            used = sum(self._bits.values())
            if node.held & ~used:
                raise AssertionError(f"block {name:x} is held by a worker that is gone")

    def _list_members(self, workers: int) -> tuple[WorkerId, ...]:
        members: list[WorkerId] = []
        while workers:
            lowest = workers & -workers
            members.append(self._workers[lowest.bit_length() - 1])
            workers ^= lowest
        return tuple(members)

    def _bit_of(self, worker: WorkerId) -> int:
        bit = self._bits.get(worker)
        if bit is None:
            at = self._free.pop() if self._free else len(self._workers)
            self._workers[at : at + 1] = [worker]
            bit = self._bits[worker] = 1 << at
        return bit

    def _complete(self, node: _Node, bits: int) -> None:
        """These workers hold everything up to a block: and what follows it, as far as they do."""
        stack = [node]
        while stack:
            node = stack.pop()
            for child in node.each_child():
                newly = child.held & node.whole & bits & ~child.whole
                if newly:
                    child.whole |= newly
                    stack.append(child)

    def _prune(self, node: _Node) -> None:
        """Forget blocks that no worker holds and nothing follows."""
        while node is not self._root and not node.held and node.children is None:
            del self._nodes[node.name]
            if node.parent is None:
                return
            node.parent.drop(node)
            node = node.parent


def _break(node: _Node, bit: int) -> None:
    """A worker lacks this block now: what follows it there cannot be reached."""
    stack = [node]
    while stack:
        node = stack.pop()
        node.whole &= ~bit
        stack.extend(child for child in node.each_child() if child.whole & bit)
