"""docs/contributing.md shows these files; here they run, found by entry points as plug-ins are."""

import asyncio
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import WorkerRef
from baton.engines.interface import ENGINES, Engine, EngineContext
from baton.ids import Epoch, WorkerId
from baton.models import DEMO_MODEL_PATH
from baton.protocol.worker_http import Role, WorkerLoad
from baton.router.fleet import Fleet, WorkerView
from baton.router.load import FleetLoad
from baton.router.placement import POLICIES, PlacementRequest, Unplaceable
from baton.store.interface import TIERS, TierContext
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import StoreContract
from baton.testing.transport_contract import TransportContract
from baton.transfer.interface import TRANSPORTS
from baton.transfer.region import allocate_host_region, release_region
from baton.worker.options import WorkerOptions
from baton.worker.worker import build_worker
from tests.unit.worker.scripted_engine import complete

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"


def load(name):
    """An example as a module of its own name."""
    module_name = f"docs_example_{name}"
    spec = spec_from_file_location(module_name, EXAMPLES / f"{name}.py")
    module = sys.modules[module_name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for each in ("transport", "tier", "engine", "policy"):
    load(each)


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """A distribution with the entry points that the page names."""
    folder = tmp_path_factory.mktemp("site-packages")
    info = folder / "example-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[baton.transports]\nloopback = docs_example_transport:PLUGIN\n"
        "[baton.tiers]\ndict = docs_example_tier:PLUGIN\n"
        "[baton.engines]\necho = docs_example_engine:PLUGIN\n"
        "[baton.policies]\nmost_free_blocks = docs_example_policy:PLUGIN\n"
    )
    monkeypatch.syspath_prepend(folder)


class TestTransport(TransportContract):
    kind = "loopback"
    peer_writes = False

    def make_transport(self, context):
        return TRANSPORTS.build(self.kind, self.options)(context)

    def allocate(self, shapes):
        return allocate_host_region(shapes)


class TestTier(StoreContract):
    def open_tier(self, place, capacity_bytes):
        options = {"place": str(place), "capacity_bytes": capacity_bytes}
        return TIERS.build("dict", options)(TierContext("example", bytes(32), ManualClock()))


def missing_members(engine):
    named = [*Engine.__annotations__, *(n for n in vars(Engine) if not n.startswith("_"))]
    return [each for each in named if not hasattr(engine, each)]


def test_the_engine_answers_through_a_worker():
    async def ask():
        context = EngineContext(DEMO_MODEL_PATH, ManualClock(), allocate_host_region)
        engine = ENGINES.build("echo", {})(context)
        options = WorkerOptions(
            worker=WorkerId("w0"),
            epoch=Epoch("e" * 32),
            served_model_name="demo",
            credentials=Credentials.of(ClusterKey(b"k" * 32)),
            transports=(),
        )
        worker = build_worker(options, engine, None, ManualClock())
        await worker.start()
        reply = await complete(worker, prompt="It was a dark evening", max_tokens=4)
        assert not missing_members(engine), "a real worker asks for all of them"
        await worker.stop(1.0)
        release_region(engine.region)
        return reply

    reply = asyncio.run(ask())
    assert reply.status == 200
    answer = reply.json()
    assert answer["usage"]["completion_tokens"] == 4
    assert "It was a dark evening".startswith(answer["choices"][0]["text"])


def worker_with(name, role, num_free):
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    load = WorkerLoad(0, 100, num_free, 16)
    return WorkerView(ref, role, "demo", "f", frozenset({"tcp"}), available=True, load=load)


def test_the_policy_takes_the_emptiest_workers():
    policy = POLICIES.build("most_free_blocks", {})("auto")
    workers = [
        worker_with("p0", Role.PREFILL, 10),
        worker_with("p1", Role.PREFILL, 90),
        worker_with("d0", Role.DECODE, 80),
        worker_with("d1", Role.DECODE, 20),
    ]
    placement = policy.place(Fleet.of(workers), PlacementRequest("demo"), FleetLoad())
    assert (placement.prefill.id, placement.decode.id) == ("p1", "d0")
    assert placement.mode == "push"
    assert isinstance(
        policy.place(Fleet.of([]), PlacementRequest("demo"), FleetLoad()), Unplaceable
    )


def test_the_page_shows_every_example():
    page = (ROOT / "docs/contributing.md").read_text()
    for example in EXAMPLES.glob("*.py"):
        # Of one line, `--8<-- "FILE"`, `ruff format` makes an expression, which shows no file.
        assert f"--8<--\nexamples/{example.name}\n--8<--" in page
