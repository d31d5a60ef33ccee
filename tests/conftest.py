"""What several folders share: options, the order of tests, another host, and vLLM's servers."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.testing.network_namespaces import FarHost, NoNamespaceError, far_host
from tests.examples import register_profile
from tests.scheduling import GroupScheduling, ServersOfGroups, rank_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from xdist.remote import Producer

    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

pytest.register_assert_rewrite(
    "baton.testing.transport_contract",
    "baton.testing.transport_pair",
    "baton.testing.store_contract",
    "baton.testing.store_faults",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-chaos", action="store_true", help="what is marked `every`, too")
    parser.addoption(
        "--explore",
        action="store_true",
        help="property tests draw more examples, others in each run",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    """Of `--dist loadscope`: tests of the same servers run in one process."""
    return GroupScheduling(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of xdist's processes
        items.sort(key=lambda item: rank_of(item.nodeid))
    if config.getoption("--all-chaos"):
        return
    left_out = [item for item in items if item.get_closest_marker("every")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("every")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """From now on garbage is searched for only among what tests make.

    To go through millions of objects of torch and hypothesis takes half a second each time.

    Raises:
        pytest.UsageError: vLLM was imported, by each process that collects the tests.
    """
    gc.disable()
    try:
        collected = yield
        if "vllm" in sys.modules:
            raise pytest.UsageError(
                "a test module imports vLLM as it is collected, which takes each process five "
                "seconds: import it in the tests, or through tests.lazy_modules"
            )
        return collected
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of xdist's processes
        config.pluginmanager.register(ServersOfGroups())
    # Several of these run at once: a second thread of torch would only wait, and spins meanwhile.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A shell's background job ignores it, and so would each process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    register_profile(explores=config.getoption("--explore"))
    config.addinivalue_line("markers", "every: runs with --all-chaos only (make chaos)")
    config.addinivalue_line(
        "markers", "vllm: starts real vLLM servers, some 15 s each; deselect with -m 'not vllm'"
    )


@pytest.fixture(scope="session", autouse=True)
def laid_cable(request: pytest.FixtureRequest) -> Iterator[FarHost | NoNamespaceError | None]:
    """Another host at the end of a cable, there before any test runs, or why there is none.

    UCX reads the routes when a process first uses it: in a process whose earlier tests did, it
    would know no route to a cable that is laid later.
    """
    if not any("far_cable" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    try:
        with far_host() as far:
            yield far
    except NoNamespaceError as exc:
        yield exc


@pytest.fixture(scope="session")
def far_cable(laid_cable: FarHost | NoNamespaceError | None) -> FarHost:
    """Another host at the end of a cable."""
    if isinstance(laid_cable, FarHost):
        return laid_cable
    pytest.skip(str(laid_cable))


@pytest.fixture(scope="session")
def vllm_cluster_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterFactory]:
    """A place to start vLLM servers: model, environment, logs. Nothing runs yet."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make install ENGINE=vllm")
    from tests.e2e_vllm.cluster import ClusterFactory  # noqa: PLC0415 - loads torch

    run_directory = Path(tempfile.mkdtemp(prefix="b-", dir="/tmp"))  # short: sockets lie in it
    try:
        with ClusterFactory.open(tmp_path_factory.mktemp("vllm"), run_directory) as cluster_factory:
            yield cluster_factory
            cluster_factory.check_shutdown()
    finally:
        shutil.rmtree(run_directory)


def _needs_vllm(item: pytest.Item) -> bool:
    """Whether a test runs with vLLM's servers, and is not skipped on this machine."""
    is_skipped = any(mark.args and mark.args[0] for mark in item.iter_markers("skipif"))
    return item.get_closest_marker("vllm") is not None and not is_skipped


@pytest.fixture(scope="session")
def vllm_cluster(
    request: pytest.FixtureRequest, vllm_cluster_factory: ClusterFactory
) -> VllmCluster:
    """The oracle and one prefill and decode server behind a gateway.

    While tests ask these, the next fixtures' servers load.
    """
    from tests.e2e_vllm.ahead import STARTERS  # noqa: PLC0415 - loads torch

    cluster = vllm_cluster_factory.build_cluster()
    asking = (item for item in request.session.items if _needs_vllm(item))
    for name in (name for item in asking for name in getattr(item, "fixturenames", ())):
        if name in STARTERS:
            vllm_cluster_factory.plan(name, STARTERS[name])
    vllm_cluster_factory.start_ahead()
    return cluster
