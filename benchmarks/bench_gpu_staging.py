"""What handing KV over costs a prefill on a GPU: staged in pinned memory of the host, or not.

    PYTHONPATH=src:. python benchmarks/bench_gpu_staging.py [--json FILE]

A thread plays vLLM's: on a stream of its own it launches a pass of matrix products, stores each
layer's KV into pages in vLLM's layout and reports the layer. Two real agents hand the pages over;
decode's is in a process of its own, on the same GPU, and reads (as vLLM's connector does by
default). Configurations take turns:

    none      nothing is handed over
    cuda_ipc  as vLLM's connector does with that transport: pages stay on the GPU
    events    as it does over `shared`: a copy comes after an event, the agent asks if it is done;
              it learns of all layers when the last one is launched
    layers    the same, but the agent learns of each layer when it is launched
    device    as it did at first: the agent waits for the whole device, then copies as it can

Of each pass: its time on the GPU; what launching it took; the time of one report of a layer on the
thread that launches; from the pass' end on the GPU until all KV has landed in the other's pages on
the GPU. Every byte is compared afterwards. `--layout LBNHC` reorders staged pages on the GPU.
Without a GPU (`--device cpu`) it shows only that it runs, without `cuda_ipc`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import WorkerRef, seal, unseal
from baton.engines.gpu.copy_stream import CopyEvent, make_recorder
from baton.engines.gpu.device_region import register_pages
from baton.engines.vllm.device_pages import DevicePages
from baton.handoff.interface import KVLanded, KVSent
from baton.handoff.kv_views import KVView
from baton.ids import Epoch, WorkerId
from baton.kv.copies import BlockTable
from baton.kv.layout import KVLayout
from baton.telemetry.trace import Stamp
from baton.transfer.region import allocate_shared_region, view_pages
from tests.gpu.vllm_layouts import LAYOUTS, allocate_layers
from tests.integration.handoff_nodes import Node, Pages, node
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
DEVICE_BATCH_BYTES = 128 << 20
"""`device_layer_batch_bytes`."""
CONFIGURATIONS = ("none", "cuda_ipc", "events", "layers", "device")
UNKEPT = {"json", "show", "child"}


@dataclass(frozen=True)
class Sample:
    """One pass; times in seconds. `landed_s` is from its end on the GPU."""

    configuration: str
    pass_s: float
    launch_s: float
    report_s: tuple[float, ...]
    landed_s: float | None


class DeviceWide:
    """A `Staging` that waits for the whole device: what `DevicePages` replaced."""

    def __init__(self, layers: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
        self._layers = [layer.view(torch.int16) for layer in layers]
        self._host = host

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: object = None,
    ) -> None:
        """See `Staging`."""
        pages = self._layers[layer]
        wait_for_device(pages.device)
        taken = pages.index_select(0, torch.tensor(blocks, device=pages.device)).cpu()
        self._host[layer][torch.tensor(staged)] = taken.view(torch.uint8).flatten(1)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: object = None,
    ) -> None:
        """See `Staging`."""
        pages = self._layers[layer]
        taken = self._host[layer][torch.tensor(staged)].view(torch.int16)
        shaped = taken.view(-1, *pages.shape[1:]).to(pages.device)
        pages.index_copy_(0, torch.tensor(blocks, device=pages.device), shaped)
        wait_for_device(pages.device)


def wait_for_device(device: torch.device) -> None:
    """Wait for all streams."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Worker:
    """Pages on the device and an agent for each way to stage them; `kv` are the layers."""

    def __init__(
        self, name: str, options: argparse.Namespace, key: Credentials, stack: ExitStack
    ) -> None:
        self.options, self.key = options, key
        shape = (options.layers, options.blocks, HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
        device = torch.device(options.device)
        self.kv = allocate_layers(options.layout, shape, torch.bfloat16, device)
        layout = describe(options)
        num_pages = 2 * options.tokens // BLOCK_SIZE
        self.nodes: dict[str, Node] = {}
        for how in find_configurations(options)[1:]:
            if how == "cuda_ipc":
                pages = Pages(layout, [], (KVView(layout, register_pages(self.kv)),))
                self._open(name, how, pages, stack, layer_batch_bytes=DEVICE_BATCH_BYTES)
                continue
            region = allocate_shared_region([(num_pages, layout.page_bytes(0))] * options.layers)
            if how != "device":
                staging = DevicePages(self.kv, region)
            else:
                host = [torch.from_numpy(view_pages(region.memory, each)) for each in region.arrays]
                staging = DeviceWide(self.kv, host)
            self._open(name, how, Pages(layout, [], (KVView(layout, region, staging),)), stack)

    def _open(
        self, name: str, how: str, pages: Pages, stack: ExitStack, *, layer_batch_bytes: int = 0
    ) -> None:
        self.nodes[how] = stack.enter_context(
            node(
                f"{name}-{how}",
                kinds=("cuda_ipc" if how == "cuda_ipc" else "shared",),
                key=self.key,
                pages=pages,
                op="READ",
                timeout_s=30.0,
                layer_batch_bytes=layer_batch_bytes,
            )
        )


def describe(options: argparse.Namespace) -> KVLayout:
    """What is in the pages."""
    layout = KVLayout.gqa(options.layers, HEADS, HEAD_DIM, block_size=BLOCK_SIZE, dtype="bfloat16")
    arrangement = f"vllm-{options.device}/benchmark/{options.layout}"
    return KVLayout(
        layout.layers, layout.block_size, layout.dtype, "opaque", layout.shard, arrangement
    )


class Model:
    """A pass: for each layer matrix products, then its KV is stored in blocks of the pages."""

    def __init__(self, options: argparse.Namespace, kv: list[torch.Tensor]) -> None:
        self.device, self.kv = torch.device(options.device), kv
        self.num_products = options.products
        streams = torch.get_device_module(self.device)
        self.on_gpu = self.device.type != "cpu"
        self.stream = streams.Stream(self.device) if self.on_gpu else None
        size = options.width
        kind = {"dtype": torch.bfloat16, "device": self.device}
        self.x = torch.randn(options.tokens, size, **kind) / size**0.5
        self.weight = torch.randn(size, size, **kind) / size**0.5
        num_blocks = options.tokens // BLOCK_SIZE
        self.new = torch.randn(num_blocks, *kv[0].shape[1:], **kind)
        self.record = self.make_record(self.device)

    @staticmethod
    def make_record(device: torch.device) -> Callable[[], object]:
        """What records a position; CPUs have none, but the copies want one."""
        if device.type == "cpu":
            return lambda: CopyEvent(torch.cpu.Event())
        return make_recorder(device)

    def run(
        self, blocks: torch.Tensor, report: Callable[[int], None], launched: Callable[[], None]
    ) -> tuple[float, float, tuple[float, ...], float]:
        """GPU time of a pass, launching time, that of each report, and when it ended."""
        took = []
        context = torch.cuda.stream(self.stream) if self.on_gpu else nullcontext()
        with context, torch.inference_mode():
            began_at = time.perf_counter()
            start, end = self._event(), self._event()
            self._mark(start)
            x = self.x
            for number, layer in enumerate(self.kv):
                for _ in range(self.num_products):
                    x = x @ self.weight
                layer.index_copy_(0, blocks, self.new)
                at = time.perf_counter()
                report(number)
                took.append(time.perf_counter() - at)
            self._mark(end)
            launched()
            launched_at = time.perf_counter()
            if end is not None:
                end.synchronize()
        ended_at = time.perf_counter()
        pass_s = ended_at - began_at if end is None else start.elapsed_time(end) / 1000
        return pass_s, launched_at - began_at, tuple(took), ended_at

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event(enable_timing=True) if self.on_gpu else None

    @staticmethod
    def _mark(event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.record()


class DecodeProcess:
    """The decode worker. One line of JSON in each direction for each step of a handoff."""

    def __init__(self, arguments: list[str], key_hex: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.send({"key": key_hex})
        self.refs = {
            how: WorkerRef(WorkerId(f"d-{how}"), Epoch(epoch), address)
            for how, (epoch, address) in self.receive().items()
        }

    def send(self, message: dict[str, object]) -> None:
        """One line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict:
        """One line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the decode process has ended"
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)


def serve_decode(options: argparse.Namespace) -> None:
    """What the decode process does: receive, and sum up what has landed."""
    key = read_key(json.loads(sys.stdin.readline())["key"])
    record = Model.make_record(torch.device(options.device))

    def say(message: dict[str, object]) -> None:
        print(json.dumps(message), flush=True)

    with ExitStack() as stack:
        worker = Worker("d", options, key, stack)
        say({how: [each.epoch, each.agent.address] for how, each in worker.nodes.items()})
        for line in sys.stdin:
            asked = json.loads(line)
            node_ = worker.nodes[asked["how"]]
            target = choose_blocks(options, asked["seed"] + 1_000)
            ticket = unseal(asked["ticket"], key)
            order = receive_order(ticket, start=0, num_tokens=options.tokens, blocks=target)
            node_.agent.start_receive(replace(order, after=record()))
            while Stamp.GRANTED not in order.trace.stamps:
                time.sleep(0.005)
            say({})
            (landed,) = node_.wait_for(timeout_s=30.0)
            landed_at = time.perf_counter()  # CLOCK_MONOTONIC, the same in both processes
            assert isinstance(landed, KVLanded), landed
            say({"landed_at": landed_at, "sums": sum_up(worker.kv, target)})


def read_key(key_hex: str) -> Credentials:
    """Both sides' key."""
    return Credentials.of(ClusterKey(bytes.fromhex(key_hex)))


def choose_blocks(options: argparse.Namespace, seed: int) -> BlockTable:
    """Blocks in random order."""
    chosen = np.random.default_rng(seed).permutation(options.blocks)
    return BlockTable(0, chosen[: options.tokens // BLOCK_SIZE])


def sum_up(layers: list[torch.Tensor], table: BlockTable) -> list[int]:
    """For each layer a sum of its numbers' bits, each by its place."""
    blocks = torch.from_numpy(table.blocks).to(layers[0].device)
    sums = []
    for layer in layers:
        bits = layer[blocks].contiguous().view(torch.int16).flatten().long()
        places = torch.arange(len(bits), device=bits.device) % 65_521 + 1
        sums.append(int((bits * places).sum()))
    return sums


def measure(how: str, model: Model, prefill: Worker, decode: DecodeProcess, seed: int) -> Sample:
    """One pass, with its handoff."""
    options = prefill.options
    table = choose_blocks(options, seed)
    blocks = torch.from_numpy(table.blocks).to(model.device)
    model.new.normal_()
    if how == "none":
        wait_for_device(model.device)
        pass_s, launch_s, report_s, _ = model.run(blocks, lambda _: None, lambda: None)
        return Sample(how, pass_s, launch_s, report_s, None)
    sender = prefill.nodes[how]
    ticket = make_ticket(sender.ref, decode.refs[how])
    decode.send({"how": how, "seed": seed, "ticket": seal(ticket, prefill.key)})
    sender.agent.start_send(send_order(ticket, num_tokens=options.tokens, blocks=table))
    decode.receive()
    time.sleep(0.1)  # the grant's way
    wait_for_device(model.device)
    tickets = [(ticket.id, options.tokens)]
    waiting: list[tuple[int, object]] = []

    def report(layer: int) -> None:
        waiting.append((layer, model.record()))
        if how != "events":
            launched()

    def launched() -> None:
        for layer, position in waiting:
            sender.agent.layer_ready(tickets, layer, position)
            if layer + 1 == len(model.kv):
                sender.agent.prefill_done(ticket.id, None)
        waiting.clear()

    pass_s, launch_s, report_s, ended_at = model.run(blocks, report, launched)
    landed = decode.receive()
    assert sender.wait_for(timeout_s=10.0) == [KVSent(ticket.id)]
    assert landed["sums"] == sum_up(prefill.kv, table), "other bytes than were computed"
    return Sample(how, pass_s, launch_s, report_s, landed["landed_at"] - ended_at)


def find_configurations(options: argparse.Namespace) -> list[str]:
    """Those that the device has."""
    return [how for how in CONFIGURATIONS if how != "cuda_ipc" or options.device != "cpu"]


def main() -> None:
    """Run the benchmark, print a table, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layout", choices=LAYOUTS, default="LBHNC")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--products", type=int, default=3, help="for each layer")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, help="a table of an earlier run's JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve_decode(options)
        return
    if options.show is not None:
        found = json.loads(options.show.read_text())
        show([Sample(**each) for each in found["samples"]], argparse.Namespace(**found["options"]))
        return
    samples: list[Sample] = []
    key_hex = os.urandom(32).hex()
    decode = DecodeProcess(sys.argv[1:], key_hex)
    with ExitStack() as stack:
        stack.callback(decode.close)
        prefill = Worker("p", options, read_key(key_hex), stack)
        model = Model(options, prefill.kv)
        for turn in range(options.repetitions + 1):  # the first warms up
            for how in find_configurations(options):
                sample = measure(how, model, prefill, decode, turn)
                if turn:
                    samples.append(sample)
            print(f"turn {turn} is done", flush=True)
    show(samples, options)
    if options.json is not None:
        name = torch.cuda.get_device_name() if (options.device != "cpu") else "cpu"
        options.json.write_text(json.dumps({
            "device": name,
            "torch": torch.__version__,
            "options": {k: v for k, v in vars(options).items() if k not in UNKEPT},
            "samples": [asdict(sample) for sample in samples],
        }, indent=1))  # fmt: skip


def show(samples: list[Sample], options: argparse.Namespace) -> None:
    """Medians, as a table for docs/gpu.md."""
    num_bytes = describe(options).bytes_per_token * options.tokens
    print(f"{options.tokens} tokens, {num_bytes >> 20} MiB, {options.layers} layers, "
          f"{options.layout}; medians of {options.repetitions}")  # fmt: skip
    print("| | pass on the GPU, ms | launching it, ms | a layer's report, us (most) "
          "| all landed after the pass, ms |\n|---|---|---|---|---|")  # fmt: skip
    for how in dict.fromkeys(sample.configuration for sample in samples):
        some = [sample for sample in samples if sample.configuration == how]
        reports = [each for sample in some for each in sample.report_s]
        landed = [sample.landed_s for sample in some if sample.landed_s is not None]
        after = f"{statistics.median(landed) * 1e3:.1f}" if landed else ""
        print(
            f"| `{how}` | {statistics.median(s.pass_s for s in some) * 1e3:.1f}"
            f" | {statistics.median(s.launch_s for s in some) * 1e3:.1f}"
            f" | {statistics.median(reports) * 1e6:.1f} ({max(reports) * 1e6:.0f}) | {after} |"
        )


if __name__ == "__main__":
    main()
