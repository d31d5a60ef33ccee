"""Many damaged inputs for each target, in as many processes as are wanted.

An input that a decoder answers in a way not seen before (another error, at another field) is kept,
and damaged further. The decoders are C (msgspec) for the most part, of which a tool that measures
Python's branches sees nothing: their errors name the field and the check, which serves as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import random
import re
import resource
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.fuzz.mutation import Tree, deep, mutate
from tests.fuzz.targets import TARGETS, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from tests.fuzz.targets import Target

CORPUS: Final = Path(__file__).parent / "corpus"
MAX_KEPT: Final = 300
"""Inputs that are damaged further, in one chunk."""
MAX_FOUND: Final = 20
MAX_GROWTH_BYTES: Final = 512 << 20
"""Of the process; an input has 64 KiB."""
MAX_CORPUS_INPUT_BYTES: Final = 1024
_VARYING: Final = re.compile(r"[0-9]+|'[^']*'|\"[^\"]*\"|b'.*|b\".*")


@dataclass(frozen=True, slots=True)
class Finding:
    """An input, and what is wrong with what came of it."""

    target: str
    data: bytes
    what: str
    where: str = ""

    @property
    def kind(self) -> str:
        """The same for inputs that show the same defect, most likely."""
        return f"{self.target}: {self.where}"


@dataclass(slots=True)
class Tally:
    """Of one chunk, or of many."""

    num_inputs: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    kept: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        self.num_inputs += other.num_inputs
        self.seconds += other.seconds
        for kind, finding in other.findings.items():
            self.findings.setdefault(kind, finding)
        for key, data in other.kept.items():
            self.kept[key] = min(self.kept.get(key, data), data, key=len)


def read_corpus(target: Target) -> list[bytes]:
    """Inputs that were kept: what found a defect, and one for each way to answer."""
    return [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]


def run_input(target: Target, data: bytes) -> tuple[str, Finding | None]:
    """What came of one input, in short, and what is wrong with that."""
    begun = time.thread_time()
    try:
        outcome = check(target, data)
    except Exception as exc:  # noqa: BLE001 - whatever a decoder raises is a finding
        where = f"{type(exc).__name__}, {_last_place(exc)}"
        return f"! {where}", Finding(target.name, data, _describe(exc), where)
    spent_s = time.thread_time() - begun
    if spent_s > target.max_s:
        what = f"it took {spent_s:.1f} s, more than {target.max_s:g} s"
        return "! slow", Finding(target.name, data, what, "slow")
    return _VARYING.sub("#", outcome)[:100], None


def _describe(exc: Exception) -> str:
    return "".join(traceback.format_exception(exc, limit=-4))


def _last_place(exc: Exception) -> str:
    """Where it was raised, or what of this package called what raised it."""
    frames = traceback.extract_tb(exc.__traceback__)
    last = next((f for f in reversed(frames) if "baton" in f.filename), frames[-1])
    return f"{last.name} in {Path(last.filename).name}"


def run_chunk(name: str, seed: int, num_inputs: int) -> Tally:
    """Inputs that follow from the seed and the corpus."""
    target, rng, tally = TARGETS[name], random.Random(f"{name}/{seed}"), Tally()
    _bound_memory()
    pool = [*target.seeds, *read_corpus(target)]
    trees = [tree for data in pool if (tree := Tree.read(target.form, data)) is not None]
    seen: set[str] = set()
    begun = time.perf_counter()
    for data in _inputs(target, rng, pool, trees, num_inputs):
        outcome, finding = run_input(target, data)
        if finding is not None:
            tally.findings.setdefault(finding.kind, finding)
        elif outcome not in seen:
            seen.add(outcome)
            tally.kept[name, outcome] = data
            if len(seen) < MAX_KEPT and len(data) <= MAX_CORPUS_INPUT_BYTES:
                pool.append(data)
                tree = Tree.read(target.form, data)
                if tree is not None:
                    trees.append(tree)
    tally.num_inputs[name] = num_inputs
    tally.seconds[name] = time.perf_counter() - begun
    return tally


def _inputs(
    target: Target,
    rng: random.Random,
    pool: Sequence[bytes],
    trees: Sequence[Tree],
    num_inputs: int,
) -> Iterator[bytes]:
    first = [*pool, *deep(target.form)][:num_inputs]
    yield from first
    for _ in range(num_inputs - len(first)):
        yield mutate(rng, target.form, pool, trees)


def _bound_memory() -> None:
    """A length that is believed before it is checked then raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError):  # a lower one is set already
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_GROWTH_BYTES, hard)
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Inputs of one target."""

    target: str
    seed: int
    num_inputs: int


def plan(names: Sequence[str], num_inputs: int, first_seed: int) -> list[Chunk]:
    """Divide the inputs among targets by weight; all targets come before any comes again."""
    total = sum(TARGETS[name].weight for name in names)
    chunks: list[tuple[int, Chunk]] = []
    for name in names:
        left, number = max(1, round(num_inputs * TARGETS[name].weight / total)), 0
        size = max(1, min(TARGETS[name].chunk, left))
        while left > 0:
            chunks.append((number, Chunk(name, first_seed + number, min(size, left))))
            left, number = left - size, number + 1
    return [chunk for _, chunk in sorted(chunks, key=lambda each: each[0])]


def run(chunks: Sequence[Chunk], jobs: int) -> Iterator[Tally]:
    """Each chunk's tally, as it ends.

    Raises:
        RuntimeError: a process died over one, which is a finding too.
    """
    if jobs == 1:
        yield from (run_chunk(each.target, each.seed, each.num_inputs) for each in chunks)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context) as executor:
        waiting = iter(chunks)
        running: dict[Future[Tally], Chunk] = {}
        while True:
            for chunk in waiting:
                future = executor.submit(run_chunk, chunk.target, chunk.seed, chunk.num_inputs)
                running[future] = chunk
                if len(running) >= 2 * jobs:
                    break
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                chunk = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool as exc:
                    raise RuntimeError(f"{exc}; one of {[chunk, *running.values()]}") from exc


def file_name(data: bytes) -> str:
    """Of an input, in a folder of its target's."""
    return hashlib.sha256(data).hexdigest()[:16]


def grow_corpus(tally: Tally, max_new: int) -> int:
    """Keep one small input for each answer that no kept one has; how many are new."""
    num_new = 0
    for name, target in TARGETS.items():
        known = {run_input(target, data)[0] for data in (*target.seeds, *read_corpus(target))}
        new = sorted(
            (len(data), outcome, data)
            for (of, outcome), data in tally.kept.items()
            if of == name and outcome not in known and len(data) <= MAX_CORPUS_INPUT_BYTES
        )
        for _, _, data in new[:max_new]:
            folder = CORPUS / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file_name(data)).write_bytes(data)
            num_new += 1
    return num_new
