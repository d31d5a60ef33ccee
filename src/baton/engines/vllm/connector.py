"""vLLM's hooks: `BatonConnector`, once in the scheduler's process and once in each worker's.

Each hook translates between vLLM's objects and plain values, and decides nothing. With one process
for all (uniproc), the two sides are two objects that share nothing.
"""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from baton.clock import MachineClock
from baton.engines.lookup_cost import LookupCost
from baton.engines.vllm import resumed_grammars
from baton.engines.vllm.admission import Admission, HeldPrompts
from baton.engines.vllm.compatibility import (
    check_hooks,
    join_logging,
    may_load_prefixes,
    read_extra,
    warn_of_graphs,
    warn_of_policy,
    warn_of_unused_store,
)
from baton.engines.vllm.engine_process import exit_at_end
from baton.engines.vllm.identity import (
    Identity,
    compute_epoch,
    default_name,
    load_credentials,
    read_model_facts,
)
from baton.engines.vllm.kept_blocks import KeptBlocks
from baton.engines.vllm.options import ConnectorOptions, read_options, read_role
from baton.engines.vllm.prefix_admission import PrefixAdmission
from baton.engines.vllm.prefix_schedule import PrefixSchedule
from baton.engines.vllm.stats import BatonPromMetrics, BatonStats
from baton.engines.vllm.step_orders import NO_ORDERS, StepOrders, StepReport
from baton.engines.vllm.tickets import NO_COUNTS, TicketReader
from baton.ids import WorkerId

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from baton.engines.vllm.identity import RankFacts
    from baton.engines.vllm.rank import Rank
    from baton.engines.vllm.rank_handoffs import RankHandoffs

check_hooks(KVConnectorBase_V1)


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc] # vLLM is untyped for us
    """Scheduler → workers, each step. None stands for `NO_ORDERS`: it is pickled to nothing."""

    orders: StepOrders | None
    has_tokens: bool
    """Whether the step computes. vLLM's forward context does not always show it: model runner V2,
    the default on GPUs, starts loads after the forward pass, in a context without metadata."""


_NOTHING: Final = {has_tokens: StepMetadata(None, has_tokens) for has_tokens in (False, True)}


@dataclass(frozen=True, slots=True)
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker → scheduler, once."""

    facts: RankFacts


@dataclass(frozen=True, slots=True)
class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker → scheduler, after a step with something to report."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        if not isinstance(other, RankReport):
            raise TypeError(f"{type(other).__name__} is not Baton's")
        return RankReport(self.report.merge(other.report))


class BatonConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # noqa: PLR0904 - vLLM's hooks
    """Hands KV over between vLLM servers, and between them and other engines.

    Raises:
        ConfigError: options, a model or a vLLM with which KV cannot be handed over.
    """

    _scheduler: Admission
    """In the scheduler's process alone."""
    _worker: RankHandoffs
    """In a worker's alone, once its KV is registered."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_logging()
        # Each of vLLM's processes searched 5,000 modules for garbage on its way out: 2 s, in which
        # its server would kill it.
        atexit.register(gc.freeze)
        self._options = read_options(read_extra(self._kv_transfer_config))
        self._rank: Rank | None = None
        self._facts: RankFacts | None = None
        self._wait_s = 0.0
        self._computes = False
        identity = _identify(vllm_config, self._options)
        if role == KVConnectorRole.SCHEDULER:
            if self._options.resumes_streams:
                resumed_grammars.install()
            num_blocks = int(kv_cache_config.num_blocks)
            self._scheduler = _admit(vllm_config, self._options, identity, num_blocks)
        else:
            self._rank = _make_rank(vllm_config, kv_cache_config, self._options, identity)

    # Scheduler's side ---------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preempted prefill's handoff is ended, and its decode worker recomputes."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.bind(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """True: one more step, without tokens, reports freed blocks to the workers, or by them."""
        return self._scheduler.needs_step

    def reset_cache(self) -> bool:
        """See `KVConnectorBase_V1`: before weights are replaced or unmapped, and on request."""
        return self._scheduler.reset()

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankHandshake]) -> None:
        self._scheduler.set_ranks({rank: shake.facts for rank, shake in metadata.items()})
        near = get_kv_transfer_group() if has_kv_transfer_group() else None
        # A rank is asked between two steps only where none is under way meanwhile.
        if isinstance(near, BatonConnector) and self._vllm_config.max_concurrent_batches == 1:
            rank, wait_s = near._worker, self._options.poll_interval_ms / 1000  # noqa: SLF001 - one class in two
            self._scheduler.use_rank(rank, wait_s)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`. Loads go up to the prompt's end.

        They are asynchronous, but for what the workers have in memory already.
        """
        # vLLM has just reported what it has cached, where a gateway asked for that. It would again
        # in each step in which the request waits.
        request.kv_cache_report_mode = "incremental"
        missing = self._scheduler.count_missing(request, num_computed_tokens)
        return missing, bool(missing) and not self._scheduler.is_read(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """See `KVConnectorBase_V1`: the store, of whichever tier, or a prefill server."""
        if not num_external_tokens:
            return {}
        is_stored = self._scheduler.is_stored(request)
        source = CacheHitSource.EXTERNAL_UNSPECIFIED if is_stored else CacheHitSource.P2P
        return {source: num_external_tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        orders = self._scheduler.step(scheduler_output)
        has_tokens = scheduler_output.total_num_scheduled_tokens > 0
        return _NOTHING[has_tokens] if orders is NO_ORDERS else StepMetadata(orders, has_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, RankReport) else None
        received, sent = connector_output.finished_recving, connector_output.finished_sending
        self._scheduler.update_from_workers(received, sent, report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, object] | None]:
        return self._scheduler.finish(request, block_ids[0])

    # Worker's side ------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        return None if self._rank is None else self._rank.pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._rank is not None:
            self._worker, self._facts = self._rank.open(kv_caches)

    def get_handshake_metadata(self) -> RankHandshake | None:
        return None if self._facts is None else RankHandshake(self._facts)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """See `KVConnectorBase_V1`: the first thing of every step."""
        if kv_connector_metadata.orders is not None:
            self._worker.prepare(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """See `KVConnectorBase_V1`: the earliest moment at which a step's orders are known."""
        super().bind_connector_metadata(connector_metadata)
        self._computes = connector_metadata.has_tokens
        self._wait_s = 0.0 if self._computes else self._options.poll_interval_ms / 1000
        orders = connector_metadata.orders
        self._worker.begin_step(NO_ORDERS if orders is None else orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: loads were begun, or are in place, since the step's orders came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only once all its KV is there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002 - vLLM's signature
        attn_metadata: object,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> None:
        """See `KVConnectorBase_V1`: in the middle of the forward pass."""
        if self._worker.follows_layers:
            self._worker.layer_done(layer_name)

    def finish_forward(self) -> None:
        """See `KVConnectorBase_V1`: the forward pass is launched. Of model runner V2 alone."""
        if self._computes:
            self._worker.forward_launched()

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`. Does not wait: blocks are held until they were read."""
        self.finish_forward()
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See `KVConnectorBase_V1`. Waits a moment where there is nothing else to do."""
        wait_s, self._wait_s = self._wait_s, 0.0
        return self._worker.get_finished(finished_req_ids, wait_s)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> RankReport | None:
        report = self._worker.take_report()
        return None if report is None else RankReport(report)

    # Both ---------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> BatonStats | None:
        if self._rank is None:
            return BatonStats.of((), self._scheduler.take_refused())
        return BatonStats.of(self._worker.take_records(), NO_COUNTS)

    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`. The scheduler's is the last thing that an engine ends."""
        if self._rank is not None:
            self._rank.close()
        elif self.role == KVConnectorRole.SCHEDULER:
            exit_at_end()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BatonStats:
        return BatonStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> BatonPromMetrics:  # noqa: ANN401 - vLLM's
        return BatonPromMetrics(*args)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """See `KVConnectorBase_V1`. Heads first: a page's bytes are adjacent, as staged pages are.

        A preference, of which vLLM warns where a backend cannot; `VLLM_KV_CACHE_LAYOUT` prevails.
        """
        config = vllm_config.model_config
        return None if config is None or config.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """False: what a full graph's replay does not report layer by layer, `finish_forward` does.

        No step waits for a load, so that no hook inside of a graph is needed for one.
        """
        return False


def _identify(vllm_config: VllmConfig, options: ConnectorOptions) -> Identity:
    transfer = vllm_config.kv_transfer_config
    epoch = compute_epoch(str(transfer.engine_id), str(vllm_config.instance_id))
    return Identity(
        worker=default_name(epoch) if options.name is None else WorkerId(options.name),
        epoch=epoch,
        role=read_role(transfer.kv_role),
        num_ranks=int(vllm_config.parallel_config.tensor_parallel_size),
    )


def _admit(
    vllm_config: VllmConfig, options: ConnectorOptions, identity: Identity, num_blocks: int
) -> Admission:
    if identity.receives:
        warn_of_policy(vllm_config.kv_transfer_config)
    clock, block_size = MachineClock(), int(vllm_config.cache_config.block_size)
    admission = Admission(
        identity,
        read_model_facts(vllm_config, options),
        block_size=block_size,
        held=HeldPrompts(int(options.max_held_share * num_blocks)),
        reader=TicketReader(
            identity, load_credentials(options), clients_are_gateways=options.clients_are_gateways
        ),
        clock=clock,
    )
    store = options.store
    if not (store.tiers and store.prefixes):
        return admission
    if may_load_prefixes(vllm_config.kv_transfer_config):
        schedule = PrefixSchedule(
            LookupCost(clock.now()),
            num_ranks=identity.num_ranks,
            block_size=block_size,
            entry_tokens=store.block_size,
        )
        kept = KeptBlocks(int(options.max_kept_share * num_blocks), identity.num_ranks)
        admission.use_store(PrefixAdmission(schedule, kept, block_size=block_size, clock=clock))
    else:
        warn_of_unused_store()
    return admission


def _make_rank(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    options: ConnectorOptions,
    identity: Identity,
) -> Rank:
    from vllm.distributed.parallel_state import get_tp_group  # noqa: PLC0415 - workers only

    from baton.engines.vllm.rank import Rank, RankPlan  # noqa: PLC0415 - the agent, torch

    if vllm_config.device_config.device_type == "cpu":
        from baton.engines.vllm import cpu_seeds  # noqa: PLC0415 - vLLM's for CPUs alone

        cpu_seeds.install()
    if identity.role != "decode":
        warn_of_graphs(vllm_config.compilation_config)
    return Rank(
        RankPlan(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            options=options,
            identity=identity,
            rank=int(get_tp_group().rank_in_group),
        )
    )
