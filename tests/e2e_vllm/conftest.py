"""The cluster of vLLM servers that these tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster


@pytest.fixture(scope="session")
def cluster_factory(vllm_cluster_factory: ClusterFactory) -> ClusterFactory:
    return vllm_cluster_factory


@pytest.fixture(scope="session")
def cluster(vllm_cluster: VllmCluster) -> VllmCluster:
    return vllm_cluster
