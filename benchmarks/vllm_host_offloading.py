"""The OffloadingConnector of vLLM on CPUs: its `CPUOffloadingSpec` with another copy.

vLLM refuses to offload from CPUs ("only supported on CUDA-alike and XPU GPUs"), since its copies
are CUDA's. All else works, and is vLLM's own here: connector, scheduler, manager and eviction. The
copies are made on one thread, block by block of a layer, into memory that is written once before,
as vLLM's region is. vLLM loads this module: `spec_name`, `spec_module_path` of the connector.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    Pages = NDArray[np.uint8]


class HostOffloadingSpec(CPUOffloadingSpec):
    """See the module."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostOffloadingWorker:
        """The engine's side."""
        if self.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise NotImplementedError("one block in a chunk, and one group of layers")
        return HostOffloadingWorker(kv_caches, self.num_chunks)


class HostOffloadingWorker(OffloadingWorker):
    """Copies blocks of all layers between the engine's pages and other memory."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._engine: list[Pages] = [
            each.tensor.numpy().view(np.uint8) for each in kv_caches.tensors
        ]
        self._host: list[Pages] = [
            np.ones((num_chunks, pages.shape[1]), np.uint8) for pages in self._engine
        ]
        self._thread = ThreadPoolExecutor(1, "offloading")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        """Out of the engine's pages."""
        args = self._engine, src_spec.block_ids, self._host, dst_spec.block_ids
        self._jobs[job_id] = self._thread.submit(copy, job_id, *args)
        return True

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        """Into them."""
        args = self._host, src_spec.block_ids, self._engine, dst_spec.block_ids
        self._jobs[job_id] = self._thread.submit(copy, job_id, *args)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Those that are done."""
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        """Until these are done."""
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def copy(
    job_id: int,
    sources: list[Pages],
    source_ids: NDArray[np.int32],
    targets: list[Pages],
    target_ids: NDArray[np.int32],
) -> TransferResult:
    """Each block of each layer."""
    began = time.perf_counter()
    num_bytes = 0
    for source, target in zip(sources, targets, strict=True):
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            np.copyto(target[target_id], source[source_id])
        num_bytes += len(source_ids) * source.shape[1]
    return TransferResult(job_id, success=True, transfer_size=num_bytes,
                          transfer_time=time.perf_counter() - began)  # fmt: skip
