"""One rank of a vLLM server, without the server: what it announces once its memory is there."""

from __future__ import annotations

import socket
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from baton.auth.ticket import WorkerRef
from baton.clock import MachineClock
from baton.config.sections import StoreSection
from baton.encodings.rates import EncodingRate, EncodingRates
from baton.engines.vllm.identity import Identity
from baton.engines.vllm.kv_views import SharedKVMemory
from baton.engines.vllm.options import ConnectorOptions
from baton.engines.vllm.rank import Rank, RankPlan
from baton.engines.vllm.step_orders import (
    Progress,
    Prompt,
    StartReceive,
    StartSend,
    StepOrders,
)
from baton.errors import ConfigError
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import TRANSFERS_PATH
from baton.telemetry.transfer_report import TransferReport
from baton.transfer.interface import TRANSPORTS
from tests import host_device
from tests.lazy_modules import LazyModule
from tests.unit.engines_vllm.caches import (
    BLOCK_SIZE,
    allocate,
    announce,
    configure,
    kv_cache_interface,
    main_layers,
    plan,
    write_model,
)
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.engines.vllm.rank_handoffs import RankHandoffs

IDENTITY = Identity(WorkerId("v0"), Epoch("0" * 32), "both", 1)
vllm_config = LazyModule("vllm.config")


@pytest.mark.parametrize(
    ("has_tiers", "has_window", "recomputes", "modes"),
    [
        (True, False, True, ("push", "pull", "pool")),
        (True, False, False, ("push", "pull", "pool")),
        (True, True, True, ("push", "pull")),  # its blocks behind the window cannot be kept
        (False, False, True, ("push", "pull")),
    ],
)
def test_the_mode_pool_is_announced_where_there_is_a_store_that_takes_the_pages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_tiers: bool,
    has_window: bool,
    recomputes: bool,
    modes: tuple[str, ...],
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    tiers = ("file",) if has_tiers else ()
    options = ConnectorOptions(
        transports=("tcp",),
        fingerprint="f" * 64,
        tls="off",
        store=StoreSection(tiers=tiers, options={"file": {"directory": str(tmp_path / "store")}}),
    )
    config = configure(write_model(tmp_path / "model"))
    policy = "recompute" if recomputes else "fail"
    config.kv_transfer_config = vllm_config.KVTransferConfig(
        kv_connector="BatonConnector", kv_role="kv_both", kv_load_failure_policy=policy
    )
    window = kv_cache_interface.SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
    )
    specs = dict.fromkeys(main_layers(), window) if has_window else main_layers()
    cache = plan(config, specs)
    announce(config, tuple(specs))
    rank = Rank(RankPlan(config, cache, options, IDENTITY, rank=0))
    try:
        context = rank.pool_context()
        assert context is not None
        with context:
            tensors = allocate(cache)
        _, facts = rank.open(tensors)
        assert facts.modes == modes
        # Without recomputing, prompts are neither loaded nor kept: there is nothing to report.
        assert facts.has_store_journal is (recomputes and "pool" in modes)
        with urllib.request.urlopen(f"{facts.control_url}{TRANSFERS_PATH}", timeout=10) as reply:
            report = msgspec.json.decode(reply.read(), type=TransferReport)
        reported = () if report.store is None else report.store.tiers
        assert [each.tier for each in reported] == (["file"] if "pool" in modes else [])
        assert all(each.capacity_bytes > 0 for each in reported)
    finally:
        rank.close()


MOST_HANDOFFS = 40
PATIENT_S = 30.0


class OpenRank:
    """A rank with memory of its own, as vLLM's worker gives it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        role: Any,
        device: str = "cpu",
        number: int = 0,
        **options: Any,
    ) -> None:
        config = configure(write_model(folder))
        config.device_config.device_type = device
        config.kv_transfer_config = vllm_config.KVTransferConfig(
            kv_connector="BatonConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
        )
        specs = main_layers()
        cache = plan(config, specs)
        announce(config, tuple(specs))
        identity = Identity(WorkerId(name), Epoch(name * 16), role, number + 1)
        connector = ConnectorOptions(**{
            "transports": ("tcp",),
            "fingerprint": "f" * 64,
            "probe_time_s": 0.05,
            **options,
        })
        self.rank = Rank(RankPlan(config, cache, connector, identity, rank=number))
        context = self.rank.pool_context()
        if device != "cpu":  # memory of this host in place of a GPU's
            assert context is None
            num_bytes = cache.kv_cache_tensors[0].size
            context = SharedKVMemory(num_bytes, host_device.allocate_region).allocation()
        assert context is not None
        with context:
            self.tensors = allocate(cache)
        self.handoffs: RankHandoffs
        self.handoffs, facts = self.rank.open(self.tensors)
        self.ref = WorkerRef(*identity.of_rank(0), facts.handoff_address)


def test_each_rank_listens_at_the_configured_ports_plus_its_number(tmp_path: Path) -> None:
    with ExitStack() as probes:
        ports = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        handoff, control, tcp = (each.getsockname()[1] - 1 for each in ports)
    opened = OpenRank(
        tmp_path / "model",
        "pp",
        "prefill",
        number=1,
        handoff_port=handoff,
        control_port=control,
        transport_options={"tcp": {"port": tcp}},
        tls="off",
    )
    try:
        for port in (handoff, control, tcp):
            socket.create_connection(("127.0.0.1", port + 1), timeout=10).close()
    finally:
        opened.rank.close()


@contextmanager
def opened(folder: Path, name: str, role: str, **options: Any) -> Iterator[OpenRank]:
    rank = OpenRank(folder, name, role, **options)
    try:
        yield rank
    finally:
        rank.rank.close()


@contextmanager
def two_ranks(folder: Path, **options: Any) -> Iterator[tuple[OpenRank, OpenRank]]:
    with (
        opened(folder, "pp", "prefill", **options) as prefill,
        opened(folder, "dd", "decode", **options) as decode,
    ):
        yield prefill, decode


def hand_over(
    prefill: OpenRank,
    decode: OpenRank,
    num_tokens: int,
    *,
    num_cached: int = 0,
    hooked: int | None = None,
) -> float:
    """One prompt, in other blocks on each side; the largest difference of what was received.

    vLLM calls the hooks of the first `hooked` layers, by default all of them.
    """
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    sent, received = tuple(range(num_blocks)), tuple(range(num_blocks + 3, 3, -1))
    ticket = make_ticket(prefill.ref, decode.ref)
    prompt = Prompt(ticket, PROMPT_HASH, num_tokens, MachineClock().now())
    decode.handoffs.begin_step(StepOrders(expected=(StartReceive("r", prompt, 0, 0, received),)))
    step = Progress("r", 0, sent, num_tokens, is_last=True)
    offers = (StartSend("r", prompt, num_cached),)
    prefill.handoffs.begin_step(StepOrders(offers=offers, progress=(step,)))
    for layer in list(prefill.tensors)[:hooked]:
        prefill.handoffs.layer_done(layer)
    prefill.handoffs.forward_launched()
    for side in (prefill, decode):
        side.handoffs.end_step()
    released, landed = prefill.handoffs.get_finished({"r"}, 0.0)[0], set[str]()
    deadline = time.monotonic() + PATIENT_S
    while not (released and landed):
        assert time.monotonic() < deadline, (released, landed)
        released |= prefill.handoffs.get_finished(set(), 0.01)[0]
        landed |= decode.handoffs.get_finished(set(), 0.01)[1]
        assert not decode.handoffs.take_invalid_blocks()
    return max(
        float((tensor[list(sent)] - decode.tensors[layer][list(received)]).abs().max())
        for layer, tensor in prefill.tensors.items()
    )


def test_kv_of_a_pass_in_a_full_graph_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replay calls no hook: of a short prompt, and of one with one token left to compute."""
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    with two_ranks(tmp_path / "model") as (prefill, decode):
        for num_tokens, num_cached, hooked in (
            (2 * BLOCK_SIZE - 1, 0, 0),
            (5 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE, 0),
            (3 * BLOCK_SIZE, 0, 1),
        ):
            for tensor in prefill.tensors.values():
                tensor.copy_(torch.randn_like(tensor))
            assert decode.tensors.keys() == prefill.tensors.keys()
            difference = hand_over(
                prefill, decode, num_tokens, num_cached=num_cached, hooked=hooked
            )
            assert difference == 0.0


def test_kv_of_two_servers_is_encoded_once_the_link_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding takes next to no time here, so that each link is slow beside it."""
    rate = EncodingRate(1e-13)
    monkeypatch.setattr(
        "baton.handoff.encoded_view.calibrate", lambda *_: EncodingRates(rate, rate)
    )
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    with two_ranks(tmp_path / "model", handoff_encoding="int8") as (prefill, decode):
        torch.manual_seed(0)
        for tensor in prefill.tensors.values():
            tensor.copy_(torch.randn_like(tensor))
        num_tokens = 5 * BLOCK_SIZE
        assert hand_over(prefill, decode, num_tokens) == 0.0, "nothing was measured"
        for _ in range(MOST_HANDOFFS):
            difference = hand_over(prefill, decode, num_tokens)
            if difference:
                break
            time.sleep(0.02)  # for what the prefill worker sends about its link
        assert 0 < difference < 0.03


def test_kv_that_a_prefill_server_may_have_loaded_is_kept_from_those_who_want_it_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decode servers received as int8 is kept under the names that it loads from."""
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    store = StoreSection(tiers=("host",))
    with (
        opened(
            tmp_path / "model", "pp", "prefill", handoff_encoding="int8", store=store
        ) as prefill,
        opened(tmp_path / "model", "dd", "decode", store=store) as decode,
    ):
        prompt = Prompt(
            make_ticket(prefill.ref, decode.ref), PROMPT_HASH, BLOCK_SIZE, MachineClock().now()
        )
        decode.handoffs.begin_step(StepOrders(expected=(StartReceive("r", prompt, 0, 0, (3,)),)))
        decode.handoffs.end_step()
        ended, deadline = set[str](), time.monotonic() + PATIENT_S
        while not ended:
            assert time.monotonic() < deadline
            ended |= decode.handoffs.get_finished(set(), 0.01)[1]
        assert decode.handoffs.take_invalid_blocks() == {3}


@pytest.mark.parametrize(
    ("device", "encoding", "reason"),
    [("cpu", "int4", r'"int4".*fp8, int8, int4_token'), ("cuda", "int8", "keeps it on cuda")],
)
def test_an_encoding_that_handoffs_cannot_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, encoding: str, reason: str
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    with pytest.raises(ConfigError, match=rf"handoff.encoding.*{reason}"):
        OpenRank(tmp_path / "model", "pp", "prefill", device, handoff_encoding=encoding)


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda_ipc` over memory of this host."""
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    monkeypatch.setattr(TRANSPORTS, "build", host_device.build_transport)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_two_servers_hand_over_in_their_gpus_memory(tmp_path: Path, op: str) -> None:
    with two_ranks(
        tmp_path / "model", device="cuda", transports=("cuda_ipc",), preferred_op=op
    ) as (prefill, decode):
        torch.manual_seed(0)
        for tensor in prefill.tensors.values():
            tensor.copy_(torch.randn_like(tensor))
        for num_tokens in (5 * BLOCK_SIZE, 3 * BLOCK_SIZE - 5):
            assert hand_over(prefill, decode, num_tokens) == 0.0
        records = decode.handoffs.take_records()
        assert [record.transport for record in records] == ["cuda_ipc"] * 2
        assert all(record.num_bytes for record in records)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        ("cpu", {}, "vLLM keeps it on the CPU"),
        ("cuda", {"handoff_encoding": "int8"}, "handoff.encoding"),
    ],
)
def test_what_a_gpus_memory_cannot_have_is_refused_at_the_start(
    tmp_path: Path, device: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        OpenRank(tmp_path / "model", "pp", "prefill", device, transports=("cuda_ipc",), **options)
