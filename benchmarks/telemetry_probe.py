"""Times the telemetry of a process, or switches its recording off, as a benchmark orders.

`Probe` is the benchmark's side. In each process that gets `Probe.environment`, a `sitecustomize.py`
calls `install` before anything else is imported: every function, method and property of the modules
in `TELEMETRY`, and those in `METHODS`, is wrapped as its module is imported. What a call does then
is one byte of a shared file:

    PLAIN   call it (and 0.2 us for the wrapper)
    TIMED   call it, and add up the thread's CPU time of the outermost of nested calls
    OFF     as PLAIN, but functions in `RECORDING` return at once

Not seen: coroutines and generators themselves (what they call is), and single assignments to a
trace. Wrappers within a timed call count as its time, so that figures are rather too high.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import json
import mmap
import os
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from pathlib import Path
from statistics import median
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from importlib.machinery import ModuleSpec

PLAIN, TIMED, OFF = range(3)
VARIABLE = "BATON_BENCHMARK_PROBE"
TELEMETRY = re.compile(
    r"baton\.telemetry\.(?!process_status|log_limit)\w+"
    r"|baton\.gateway\.(\w*metrics|tail_sampling|kept_traces|request_traces|transfer_\w+"
    r"|rank_reports|otel_\w+)"
    r"|baton\.gateway\.(alerts|dashboard)\.\w+"
    r"|baton\.worker\.metrics|baton\.events\.metrics|baton\.engines\.vllm\.(rank_observer|stats)"
    r"|baton\.handoff\.awaited_stamps"
)
PROMETHEUS = {
    "prometheus_client.metrics": {
        "Counter.inc", "Gauge.inc", "Gauge.dec", "Gauge.set", "Histogram.observe"
    },
    "prometheus_client.exposition": {"generate_latest"},
}  # fmt: skip
"""Left out in processes of vLLM, which has metrics of its own."""
METHODS = {
    **PROMETHEUS,
    "baton.gateway.request_context": {
        "RequestContext.finish", "RequestContext.headers_to_workers",
        "RequestContext.open_token_gaps",
    },
    "baton.handoff.incoming": {
        "IncomingHandoff.stamp_progress", "IncomingHandoff.write_trace",
    },
}  # fmt: skip
RECORDING = {
    "baton.telemetry.handoff_metrics.HandoffInstruments.landed",
    "baton.telemetry.handoff_metrics.HandoffInstruments.finished",
    "baton.telemetry.links.LinkInstruments.chosen",
    "baton.telemetry.links.LinkInstruments.carried",
    "baton.telemetry.links.LinkInstruments.failed",
    "baton.telemetry.links.LinkInstruments.measured",
    "baton.telemetry.links.LinkInstruments.transferred",
    "baton.telemetry.trace.TraceRing.add",
    "baton.telemetry.trace.RequestSpan.note_chunk",
    "baton.telemetry.trace.RequestSpan.verified",
    "baton.gateway.request_traces.RequestHistory.add",
    "baton.gateway.kept_traces.KeptTraces.offer",
    "prometheus_client.metrics.Counter.inc",
    "prometheus_client.metrics.Histogram.observe",
    "prometheus_client.metrics.Gauge.set",
}
"""What nothing but telemetry reads, and may be left out while a process serves."""
DUMP_INTERVAL_S = 0.2
SETTLE_S = 3 * DUMP_INTERVAL_S
NUM_CALIBRATED = 2000

Timed = Counter[str]
"""`function/calls` and `function/ns`: what was timed so far; `function/skipped`: calls left out."""


@dataclass(frozen=True)
class Probe:
    """The benchmark's side. `folder` is its own."""

    folder: Path
    _switch: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_switch", self.folder / "switch")
        self.switch(PLAIN)
        site = self.folder / "site"
        site.mkdir()
        here = str(Path(__file__).parent)
        (site / "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({here!r})\nimport telemetry_probe\n"
            f"telemetry_probe.install({str(self.folder)!r})\n"
        )

    @property
    def environment(self) -> dict[str, str]:
        """For the processes to be probed."""
        places = [str(self.folder / "site"), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, places))}

    def switch(self, mode: int) -> None:
        """What every process does from now on."""
        with self._switch.open("r+b" if self._switch.exists() else "wb") as file:
            file.write(bytes([mode]))

    def read(self, pids: Iterable[int]) -> Timed:
        """What these processes have timed until a moment ago, without what timing took."""
        found: Timed = Counter()
        for pid in set(pids):
            with contextlib.suppress(FileNotFoundError):
                found.update(json.loads((self.folder / f"{pid}.json").read_text()))
        return found


# In the probed process ----------------------------------------------------------------------------


@dataclass
class _State:
    """Of one thread."""

    is_inside: bool = False
    found: dict[str, list[int]] = field(default_factory=dict)


class _Process:
    """What this process has timed. One for each process."""

    def __init__(self, folder: Path) -> None:
        with (folder / "switch").open("rb") as file:
            self.switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._folder = folder
        self._states: list[_State] = []
        self.local = threading.local()
        self._overhead_ns = 0.0
        self.skipped: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Here, and in a forked child."""
        self._states.clear()
        self.skipped.clear()
        self.local = threading.local()
        threading.Thread(target=self._run, name="telemetry-probe", daemon=True).start()

    def state(self) -> _State:
        """Of the calling thread."""
        try:
            return self.local.state
        except AttributeError:
            state = self.local.state = _State()
            self._states.append(state)
            return state

    def calibrate(self) -> None:
        """How much an empty function is timed as."""
        state, samples = _State(), []
        for _ in range(5):
            for _ in range(NUM_CALIBRATED):
                _time(state, "", _nothing, (), {})
            num, ns = state.found.pop("")
            samples.append(ns / num)
        self._overhead_ns = median(samples)

    def _run(self) -> None:
        written = None
        while True:
            time.sleep(DUMP_INTERVAL_S)
            skipped = dict(self.skipped)
            found = Counter({f"{name}/skipped": num for name, num in skipped.items()})
            for state in tuple(self._states):
                for name, (num, ns) in tuple(state.found.items()):
                    found[f"{name}/calls"] += num
                    found[f"{name}/ns"] += max(0, round(ns - num * self._overhead_ns))
            if found != written:
                written = found
                path = self._folder / f"{os.getpid()}.json"
                path.with_suffix(".new").write_text(json.dumps(found))
                path.with_suffix(".new").replace(path)


def _nothing() -> None:
    pass


def _time(
    state: _State, name: str, function: Callable[..., object], args: tuple, kwargs: dict
) -> object:
    state.is_inside = True
    began = time.thread_time_ns()
    try:
        return function(*args, **kwargs)
    finally:
        took = time.thread_time_ns() - began
        state.is_inside = False
        entry = state.found.get(name)
        if entry is None:
            state.found[name] = [1, took]
        else:
            entry[0] += 1
            entry[1] += took


def install(folder: str) -> None:
    """Wrap telemetry functions as their modules are imported, from now on."""
    process = _Process(Path(folder))
    process.calibrate()
    os.register_at_fork(after_in_child=process.begin)
    sys.meta_path.insert(0, _Finder(process))


class _Finder(MetaPathFinder):
    """Finds a module as the others do, and wraps its functions once it is there."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """None where nothing is to be wrapped."""
        is_telemetry = TELEMETRY.fullmatch(name) is not None
        if not is_telemetry and name not in METHODS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load, chosen = spec.loader.exec_module, None if is_telemetry else METHODS[name]

        def exec_module(module: ModuleType) -> None:
            load(module)
            _wrap_module(self._process, module, chosen)

        spec.loader.exec_module = exec_module
        return spec


def _wrap_module(process: _Process, module: ModuleType, chosen: set[str] | None) -> None:
    for name, value in tuple(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            _replace(process, module, name, value, chosen)
        elif isinstance(value, type) and not issubclass(value, enum.Enum):
            for attribute, member in tuple(vars(value).items()):
                if not attribute.startswith("__"):
                    _replace(process, value, attribute, member, chosen)


def _replace(
    process: _Process, owner: object, name: str, member: object, chosen: set[str] | None
) -> None:
    """Wrap one member of a module or class, if it is a function of some kind."""
    kind: Callable[..., object] = type(member)
    if isinstance(member, property):
        function, kind = member.fget, property
    else:
        function = getattr(member, "__func__", member)
    if not isinstance(function, FunctionType):
        return
    is_lazy = inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function)
    if is_lazy or inspect.isasyncgenfunction(function):
        return
    if chosen is not None and function.__qualname__ not in chosen:
        return
    wrapped = _wrap(process, function)
    setattr(owner, name, wrapped if kind is FunctionType else kind(wrapped))


def _wrap(process: _Process, function: FunctionType) -> Callable[..., object]:
    name = f"{function.__module__}.{function.__qualname__}"
    is_recording, is_prometheus = name in RECORDING, function.__module__ in PROMETHEUS
    switch, get_state = process.switch, process.state

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        mode = switch[0]
        if mode == PLAIN or (is_prometheus and "vllm" in sys.modules):
            return function(*args, **kwargs)
        if mode == OFF:
            if not is_recording:
                return function(*args, **kwargs)
            process.skipped[name] += 1
            return None
        state = get_state()
        if state.is_inside:
            return function(*args, **kwargs)
        return _time(state, name, function, args, kwargs)

    return called
