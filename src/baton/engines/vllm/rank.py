"""Builds one tensor-parallel rank: its memory's views, its agent, its control server.

Rank(…) ─ pool_context ─ vLLM allocates ─ open(kv_caches) ─ handoffs ─ close
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

import baton
from baton.clock import MachineClock
from baton.engines.gpu.copy_stream import make_recorder
from baton.engines.vllm.compatibility import may_load_prefixes
from baton.engines.vllm.control import ControlServer, RankView
from baton.engines.vllm.device_pages import DevicePages
from baton.engines.vllm.identity import (
    RankFacts,
    describe_worker,
    find_fingerprint,
    load_credentials,
    read_model_facts,
    read_traits,
)
from baton.engines.vllm.kv_views import (
    SharedKVMemory,
    build_encoded_views,
    build_kv_views,
    choose_staging_bytes,
    try_build_store_view,
)
from baton.engines.vllm.layouts import read_layers
from baton.engines.vllm.model_variant import describe_variant, extend_fingerprint
from baton.engines.vllm.rank_handoffs import RankHandoffs
from baton.engines.vllm.rank_observer import FALLBACK_CAUSE, RankObserver
from baton.engines.vllm.rank_prompts import RankSetting
from baton.engines.vllm.registered_pages import register_kv_view
from baton.errors import ConfigError
from baton.events.journal import CacheJournal
from baton.handoff.dispatcher import HandoffDispatcher, open_handoffs
from baton.handoff.encoded_view import open_handoff_encodings
from baton.handoff.lease_file import LeaseFile
from baton.handoff.link_page import describe_links
from baton.handoff.options import AgentOptions
from baton.handoff.peer_transports import LinkOptions
from baton.handoff.pool_mode.metrics import PoolModeCollector
from baton.handoff.pool_mode.store_access import list_lossy, open_store_access, report_to
from baton.handoff.pool_mode.store_report import report_store
from baton.handoff.verify import VerificationPolicy
from baton.kv.layout import TensorParallelShard
from baton.net.tls import ClusterTls
from baton.store.interface import PeerAccess
from baton.telemetry.handoff_metrics import HandoffInstruments
from baton.telemetry.links import LinkInstruments
from baton.telemetry.log_limit import WARNINGS
from baton.telemetry.metrics import HeldBlockTimeCollector, set_worker_info
from baton.telemetry.trace import TraceRing
from baton.telemetry.transfers import TransferTable
from baton.transfer.devices.extents import choose_allocation
from baton.transfer.interface import TransportContext, build_transports, choose_memory
from baton.transfer.links.probes import ProbeBounds
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from baton.engines.vllm.identity import Identity
    from baton.engines.vllm.options import ConnectorOptions
    from baton.handoff.interface import StreamPosition
    from baton.handoff.kv_views import KVView
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.transfer.interface import Transport

logger = logging.getLogger(__name__)

NUM_TRACES: Final = 1024


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank is built from. `rank` is the tensor-parallel one."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    options: ConnectorOptions
    identity: Identity
    rank: int


class Rank:
    """One rank of a vLLM server. Owned by vLLM's worker thread."""

    def __init__(self, plan: RankPlan) -> None:
        """Check what can be checked before memory is allocated.

        Raises:
            ConfigError: a model, or a way to run it, whose KV cannot be handed over.
        """
        self._plan = plan
        shard = TensorParallelShard(plan.rank, plan.identity.num_ranks)
        self._layers = read_layers(plan.vllm_config, plan.kv_cache_config, shard)
        kind, error_budget = plan.options.handoff_encoding, plan.options.handoff_error_budget
        self._encodings = open_handoff_encodings(kind, self._layers.main_layout, error_budget)
        device = plan.vllm_config.device_config.device_type
        if self._encodings and device != "cpu":
            raise ConfigError(
                "handoff.encoding and handoff.error_budget need KV in the host's memory, and vLLM "
                f"keeps it on {device}: set neither"
            )
        self._credentials = load_credentials(plan.options)
        self._tls: ClusterTls | None = None
        if plan.options.tls != "off":
            self._tls = ClusterTls(self._credentials)
        self._clock = MachineClock()
        self._transports = self._build_transports()
        self._memory = choose_memory(self._transports)
        if self._memory == "cuda" and device == "cpu":
            raise ConfigError(
                "transfer.transports moves KV between GPUs (cuda_ipc), and vLLM keeps it on "
                "the CPU: choose another transport"
            )
        self._wake_event = threading.Event()
        self._pool: SharedKVMemory | None = None
        self._kv_views: tuple[KVView, ...] = ()
        self._store_view: KVView | None = None
        self._dispatcher: HandoffDispatcher | None = None
        self._control: ControlServer | None = None

    @property
    def _main_names(self) -> tuple[str, ...]:
        """The main model's layers, in the order of the KV views."""
        return self._layers.names[: self._layers.num_main]

    def pool_context(self) -> AbstractContextManager[object] | None:
        """The context in which vLLM allocates KV, so that peers on this host can map it."""
        if self._plan.vllm_config.device_config.device_type != "cpu":
            return None
        tensors = self._plan.kv_cache_config.kv_cache_tensors
        if not tensors:
            return None
        # Every tensor is a view of one allocation, and its size is that of the whole.
        allocate = choose_allocation(self._plan.options.transport_options)
        self._pool = SharedKVMemory(tensors[0].size, allocate)
        return self._pool.allocation()

    def open(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[RankHandoffs, RankFacts]:
        """Show the KV to peers, and answer them from now on.

        Raises:
            ConfigError: a port is taken, or the KV is not what vLLM announced.
            TransferError: a transport cannot expose the memory.
        """
        plan = self._plan
        options = plan.options
        device = next(iter(kv_caches.values())).device
        self._build_views(kv_caches, choose_staging_bytes(options.staging_bytes, device))
        fingerprint, variant = self._identify_model()
        journal = CacheJournal()
        access = self._open_pool(fingerprint, journal)
        dispatcher = open_handoffs(self._agent_options(fingerprint, variant, access), access)
        agent = dispatcher.agent
        registry = CollectorRegistry()
        registry.register(WARNINGS)
        traces = TraceRing(NUM_TRACES)
        transfers = TransferTable(
            plan.identity.of_rank(plan.rank)[1],
            self._clock,
            lambda: agent.num_lapsed_leases,
            lambda: report_store(dispatcher.store),
        )
        observer = _observe(dispatcher, registry, traces, transfers)
        if dispatcher.store is not None:
            prefixes = dispatcher.store.prefixes.counts
            registry.register(PoolModeCollector(dispatcher.store.access, prefixes))
        dispatcher.start(self._wake_event.set)
        self._dispatcher = dispatcher
        handoffs = self._handoffs(dispatcher, observer, make_recorder(device))
        control = ControlServer(
            options.handoff_host,
            _port_of(options.control_port, plan.rank),
            credentials=self._credentials,
            tls=self._tls,
        )
        self._control = control
        facts = RankFacts(
            agent.address,
            control.url,
            fingerprint,
            self._layers.main_layout,
            dispatcher.modes,
            has_store_journal=access is not None and access.journal is not None,
        )
        model = read_model_facts(plan.vllm_config, options)
        info = describe_worker(plan.identity, model, {plan.rank: facts})
        set_worker_info(
            registry,
            {
                "worker": plan.identity.worker,
                "rank": str(plan.rank),
                "role": plan.identity.role,
                "engine": info.engine or "vllm",
                "version": baton.__version__,
            },
        )
        control.start(
            RankView(
                info=lambda: info,
                is_alive=lambda: dispatcher.is_alive,
                occupancy=lambda: handoffs.occupancy,
                store_loads=lambda: handoffs.store_loads,
                journal=journal,
                abort_from_peer=handoffs.abort_from_peer,
                links=partial(describe_links, agent),
                traces=traces,
                transfers=transfers,
                registry=registry,
            )
        )
        logger.info(
            "%s hands over at %s, answers control at %s", info.worker, agent.address, control.url
        )
        return handoffs, facts

    def close(self) -> None:
        """End the agent, whose transports expose the memory, then give the memory back."""
        if self._control is not None:
            self._control.stop()
            self._control = None
        if self._dispatcher is not None:
            self._dispatcher.stop()
            self._dispatcher = None
        store_views = () if self._store_view is None else (self._store_view,)
        for view in (*self._kv_views, *store_views):
            if isinstance(view.staging, DevicePages):
                view.staging.close()
            release_region(view.region)
        self._kv_views, self._store_view = (), None
        if self._pool is not None:
            self._pool.release()
            self._pool = None

    def _identify_model(self) -> tuple[str, str]:
        """The fingerprint of what computes KV here, and the settings in it beside the files."""
        config = self._plan.vllm_config
        variant = describe_variant(config, self._layers)
        if variant:
            logger.info("KV is shared only with servers that have these settings: %s", variant)
        files = self._plan.options.fingerprint or find_fingerprint(config.model_config)
        return extend_fingerprint(files, variant), variant

    def _build_views(self, kv_caches: Mapping[str, torch.Tensor], staging_bytes: int) -> None:
        """How peers and the store see the KV: `close` gives the memory back."""
        config, layers, store = self._plan.vllm_config, self._layers, self._plan.options.store
        if self._memory == "cuda":
            self._kv_views = (register_kv_view(config, layers, kv_caches),)
        else:
            self._kv_views = build_kv_views(
                config, layers, kv_caches, self._pool, staging_bytes=staging_bytes
            )
        if self._encodings:
            encoded = build_encoded_views(
                config,
                layers,
                kv_caches,
                self._encodings,
                staging_bytes=staging_bytes,
                clock=self._clock,
            )
            self._kv_views = (*self._kv_views, *encoded)
        if store.tiers:
            self._store_view = try_build_store_view(
                config, layers, kv_caches, store_block_size=store.block_size
            )

    def _handoffs(
        self,
        dispatcher: HandoffDispatcher,
        observer: RankObserver,
        record_position: Callable[[], StreamPosition | None],
    ) -> RankHandoffs:
        plan = self._plan
        worker, epoch = plan.identity.of_rank(plan.rank)
        setting = RankSetting(
            worker=worker,
            epoch=epoch,
            rank=plan.rank,
            layout=self._layers.main_layout,
            layers={name: index for index, name in enumerate(self._main_names)},
            record_position=record_position,
        )
        return RankHandoffs(
            setting,
            dispatcher,
            wake_event=self._wake_event,
            clock=self._clock,
            observer=observer,
        )

    def _agent_options(
        self, fingerprint: str, variant: str, access: StoreAccess | None
    ) -> AgentOptions:
        plan, options = self._plan, self._plan.options
        worker, epoch = plan.identity.of_rank(plan.rank)
        native = self._kv_views[0].layout
        arrangement = native.arrangement or native.order
        lossy = list_lossy(self._encodings, access, receives=plan.identity.receives)
        return AgentOptions(
            worker=worker,
            epoch=epoch,
            fingerprint=fingerprint,
            views=self._kv_views,
            traits=read_traits(plan.vllm_config, plan.rank, arrangement, variant) | lossy,
            preferred_op=options.preferred_op,
            transports=self._transports,
            credentials=self._credentials,
            clock=self._clock,
            host=options.handoff_host,
            port=_port_of(options.handoff_port, plan.rank),
            timeout_s=options.handoff_timeout_s,
            liveness_timeout_s=options.liveness_timeout_s,
            lease_s=options.lease_s,
            layer_batch_bytes=(
                options.device_layer_batch_bytes
                if self._memory == "cuda"
                else options.layer_batch_bytes
            ),
            verification=VerificationPolicy.of(options),
            links=LinkOptions(
                options.choice, ProbeBounds(options.probe_time_s, options.probe_bytes)
            ),
            spin_s=options.spin_s,
            write_lease=LeaseFile.open(Path(options.lease_file)) if options.lease_file else None,
        )

    def _open_pool(self, fingerprint: str, journal: CacheJournal) -> StoreAccess | None:
        if self._store_view is None:
            return None
        section = self._plan.options.store
        may_load = may_load_prefixes(self._plan.vllm_config.kv_transfer_config)
        access = open_store_access(
            section,
            self._store_view,
            key=self._credentials.key,
            clock=self._clock,
            keeps_prefixes=section.prefixes and may_load,
            handoff_encodings=self._encodings,
            peers=PeerAccess(self._credentials, self._tls_of_kv, serves=True),
        )
        if self._plan.rank != 0:  # gateways ask rank 0 alone
            return access
        return report_to(journal, access, fingerprint=fingerprint, clock=self._clock)

    @property
    def _tls_of_kv(self) -> ClusterTls | None:
        return self._tls if self._plan.options.tls == "all" else None

    def _build_transports(self) -> tuple[Transport, ...]:
        plan, options = self._plan, self._plan.options
        _, epoch = plan.identity.of_rank(plan.rank)
        context = TransportContext(
            credentials=self._credentials,
            epoch=epoch,
            bind_host=options.handoff_host,
            clock=self._clock,
            tls=self._tls_of_kv,
            rank=plan.rank,
        )
        return build_transports(options.transports, options.transport_options, context)


def _observe(
    dispatcher: HandoffDispatcher,
    registry: CollectorRegistry,
    traces: TraceRing,
    transfers: TransferTable,
) -> RankObserver:
    """Count a rank's handoffs and links; before its agent starts."""
    paths = dispatcher.receive_paths
    dispatcher.agent.observe_links(LinkInstruments(registry, paths, transfers))
    counts = HandoffInstruments(registry, paths, (FALLBACK_CAUSE,), transfers)
    observer = RankObserver(traces, counts)
    registry.register(HeldBlockTimeCollector(lambda: observer.held_block_s))
    return observer


def _port_of(first: int, rank: int) -> int:
    return first + rank if first else 0
